"""The MPI engine: every collective through the MPI library that mpi4py finds. The only module that imports mpi4py."""

import ctypes
import functools
import os
import sys
import time

import numpy as np

from .reduction import OPS
from .work import Deferred


def load(launched):
    """mpi4py's MPI module, initialised; `launched` is the number of ranks that the launcher says it started.

    RuntimeError where no MPI library can be loaded, or where it knows nothing of the launcher: each rank would go on
    alone, as N trainings of one rank.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:   # without a library mpi4py raises RuntimeError
        raise RuntimeError(
            f"the launcher started {launched} ranks, but mpi4py can't load an MPI library ({error}). Install the one "
            f"that this mpirun belongs to, e.g. `pip install mpich` and its mpirun, or start one process without it"
        ) from error
    if launched > 1 and MPI.COMM_WORLD.size == 1:
        library = MPI.Get_library_version().splitlines()[0].strip()
        raise RuntimeError(
            f"the launcher started {launched} ranks, but the MPI library that mpi4py loaded ({library}) sees only 1: "
            f"the launcher belongs to another MPI. Use the mpirun of that library (of a wheel: the one beside this "
            f"python), under Slurm `srun --mpi=pmi2` or `--mpi=pmix`; `python -m minitorch_dist doctor` shows both")
    return MPI


def is_loaded():
    """Whether this process has come to MPI_Init, by load() or by itself."""
    return "mpi4py.MPI" in sys.modules


def is_running():
    """Whether MPI is initialised, and not yet finalised."""
    MPI = sys.modules.get("mpi4py.MPI")
    return MPI is not None and MPI.Is_initialized() and not MPI.Is_finalized()


def allows_threads():
    """Whether one thread may call MPI while another waits in it, as mpi4py asks for."""
    MPI = sys.modules["mpi4py.MPI"]
    return MPI.Query_thread() == MPI.THREAD_MULTIPLE


def abort(status):
    """End all ranks of the job; nothing, where MPI isn't initialised."""
    if is_running():
        sys.modules["mpi4py.MPI"].COMM_WORLD.Abort(status)


posted = set()         # Requests that haven't completed: MPI reads and writes their buffers, so they must not die
INTERNAL_TAG = 32767   # MPI promises tags up to this one; users have those below


def outlive_python(seconds):
    """At the end of the program: what is posted and nobody has waited for is given so many seconds to complete, as it
    does where the other ranks have posted it too. The memory of the rest stays until the process has ended, for
    MPI_Finalize comes after Python has freed all other memory, and may still write to it."""
    left, limit = set(posted), time.monotonic() + seconds
    while left and is_running() and time.monotonic() < limit:
        left = {request for request in left if not request.has_ended()}
        time.sleep(0.002)
    for request in left:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(request))


def pretended_nodes():
    """MINITORCH_NODES=2, for tests and for trying out on one machine: the ranks pretend to live on so many nodes, in
    blocks of equal or almost equal size. None: nobody pretends."""
    text = os.environ.get("MINITORCH_NODES")
    if text is not None and not (text.isascii() and text.isdigit() and int(text)):
        raise ValueError(f"MINITORCH_NODES={text!r} must be a number of pretended nodes, 1 or more")
    return None if text is None else int(text)


def nodes_of_world(MPI, world):
    """The number of each rank's node, by rank. Collective."""
    if count := pretended_nodes():
        return [rank * count // world.size for rank in range(world.size)]
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    first, firsts = np.array([world.rank]), np.empty(world.size, np.int64)
    node.Bcast(first, 0)
    node.Free()
    world.Allgather(first, firsts)
    return firsts.tolist()


def as_bytes(x):
    """The bytes of a contiguous array, as a view."""
    return x.reshape(-1).view(np.uint8)


@functools.cache
def wrapping_sum(MPI, dtype):
    """The sum of 8- and 16-bit integers modulo 2⁸ or 2¹⁶, as NumPy's. Open MPI's own saturates with AVX, and wraps
    without (5.0.11; ompi/mca/op/avx), depending on the processor and even on an array's length."""
    def add(theirs, ours, _):
        ours = np.frombuffer(ours, dtype)
        np.add(np.frombuffer(theirs, dtype), ours, out=ours)
    return MPI.Op.Create(add, commute=True)


class MpiEngine:
    """Collectives of one MPI communicator. Calls with async_op return a Request, the others None.

    Data that is only moved travels as bytes, so that every dtype can.
    """

    _fence_window = None

    def __init__(self, MPI, comm, node_of=None):
        self.MPI, self.comm = MPI, comm
        self.rank, self.size = comm.rank, comm.size
        self._ops = {"sum": MPI.SUM, "mean": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}
        self.world_ranks = comm.group.Translate_ranks(list(range(self.size)), MPI.COMM_WORLD.group)
        self._node_of = nodes_of_world(MPI, comm) if node_of is None else node_of   # by world rank
        self.nodes = self._nodes()
        self.on_one_node = len(self.nodes) == 1

    def _nodes(self):
        """The ranks of each node, nodes in the order of their first rank."""
        nodes = {}
        for rank, world_rank in enumerate(self.world_ranks):
            nodes.setdefault(self._node_of[world_rank], []).append(rank)
        return list(nodes.values())

    # ------------------------------------------------------------ collectives

    def _op(self, op, x):
        narrow = op == "sum" and x.dtype.itemsize < 4
        return wrapping_sum(self.MPI, x.dtype) if narrow else self._ops[op]

    def all_reduce(self, x, op, exact=False, async_op=False):
        if exact:
            exchange = Deferred(lambda: self._exchange_tree(x, op))
            return exchange if async_op else exchange.run()
        if async_op:
            request = self.comm.Iallreduce(self.MPI.IN_PLACE, x, self._op(op, x))
            return Request(self, request, x, then=lambda: self._finish_mean(x, op))
        self.comm.Allreduce(self.MPI.IN_PLACE, x, self._op(op, x))
        self._finish_mean(x, op)

    def _finish_mean(self, x, op):
        if op == "mean":
            np.divide(x, self.size, out=x)

    def _exchange_tree(self, x, op):
        """Sum along the balanced binary tree: after the exchange with rank XOR d, groups of 2d ranks hold equal sums.

        rank   0     1     2     3
        d=1    0+1   1+0   2+3   3+2       a + b == b + a to the last bit, so both partners hold the same
        d=2       (0+1)+(2+3)  on all
        """
        theirs, distance = np.empty_like(x), 1
        while distance < self.size:
            peer = self.rank ^ distance
            self.comm.Sendrecv(as_bytes(x), peer, INTERNAL_TAG, as_bytes(theirs), peer, INTERNAL_TAG)
            OPS[op](x, theirs, out=x)
            distance *= 2

    def reduce_scatter(self, out, x, op, async_op=False):
        aliased = np.may_share_memory(out, x)   # out may be this rank's share of x, which MPI forbids
        target = np.empty_like(out) if aliased else out

        def finish():
            if aliased:
                np.copyto(out, target)
            self._finish_mean(out, op)
        if async_op:
            request = self.comm.Ireduce_scatter_block(x, target, op=self._op(op, x))
            return Request(self, request, (target, x), then=finish)
        self.comm.Reduce_scatter_block(x, target, op=self._op(op, x))
        finish()

    def all_gather(self, out, x, async_op=False):
        mine = self.MPI.IN_PLACE if np.may_share_memory(out, x) else as_bytes(x)
        if async_op:
            return Request(self, self.comm.Iallgather(mine, as_bytes(out)), (out, x))
        self.comm.Allgather(mine, as_bytes(out))

    def all_to_all(self, out, x, send_counts, recv_counts, async_op=False):
        """The counts are rows, one per rank."""
        send = [as_bytes(x), [rows * _row_bytes(x) for rows in send_counts]]
        recv = [as_bytes(out), [rows * _row_bytes(out) for rows in recv_counts]]
        if async_op:
            return Request(self, self.comm.Ialltoallv(send, recv), (out, x))
        self.comm.Alltoallv(send, recv)

    def broadcast(self, x, src, async_op=False):
        if async_op:
            return Request(self, self.comm.Ibcast(as_bytes(x), src), x)
        self.comm.Bcast(as_bytes(x), src)

    def reduce(self, x, dst, op, async_op=False):
        """The result is written to rank dst's x; the others' stay as they are."""
        buffers = (self.MPI.IN_PLACE, x) if self.rank == dst else (x, None)

        def finish():
            if self.rank == dst:
                self._finish_mean(x, op)
        if async_op:
            return Request(self, self.comm.Ireduce(*buffers, self._op(op, x), dst), x, then=finish)
        self.comm.Reduce(*buffers, self._op(op, x), dst)
        finish()

    def scatter(self, out, x, src, async_op=False):
        """x counts on rank src only."""
        whole = as_bytes(x) if self.rank == src else None
        part = self.MPI.IN_PLACE if self.rank == src and np.may_share_memory(out, x) else as_bytes(out)
        if async_op:
            return Request(self, self.comm.Iscatter(whole, part, src), (out, x))
        self.comm.Scatter(whole, part, src)

    def gather(self, out, x, dst, async_op=False):
        """out counts on rank dst only."""
        whole = as_bytes(out) if self.rank == dst else None
        part = self.MPI.IN_PLACE if self.rank == dst and np.may_share_memory(out, x) else as_bytes(x)
        if async_op:
            return Request(self, self.comm.Igather(part, whole, dst), (out, x))
        self.comm.Gather(part, whole, dst)

    def barrier(self):
        self.comm.Barrier()

    # ------------------------------------------------------------ messages

    def send(self, x, dst, tag, async_op=False):
        if async_op:
            return Request(self, self.comm.Isend(as_bytes(x), dst, tag), x)
        self.comm.Send(as_bytes(x), dst, tag)

    def recv(self, x, src, tag, async_op=False):
        status = self.MPI.Status()

        def unequal(arrived):
            return RuntimeError(
                f"recv from rank {src} with tag {tag} got {arrived} bytes for an array of {x.nbytes} "
                f"({x.dtype}{list(x.shape)}); send and recv must name arrays of one shape and dtype")

        def check_size():
            if status.Get_count(self.MPI.BYTE) != x.nbytes:
                raise unequal(status.Get_count(self.MPI.BYTE))

        def in_our_words(error):
            too_long = error.Get_error_class() == self.MPI.ERR_TRUNCATE
            return unequal(f"more than {x.nbytes}") if too_long else error
        if async_op:
            return Request(self, self.comm.Irecv(as_bytes(x), src, tag), x, check_size, status, in_our_words)
        try:
            self.comm.Recv(as_bytes(x), src, tag, status)
        except self.MPI.Exception as error:
            raise in_our_words(error) from None
        check_size()

    def probe(self, tag):
        """(rank, number of bytes) of a message with this tag that waits here, the first that came; None: there is none.
        recv from that rank takes this one, if nobody else receives meanwhile."""
        status = self.MPI.Status()
        if not self.comm.Iprobe(self.MPI.ANY_SOURCE, tag, status):
            return None
        return status.Get_source(), status.Get_count(self.MPI.BYTE)

    # ------------------------------------------------------------ the job

    def split(self, color, key):
        """The engine of the ranks with this color, ordered by key; None for color None."""
        comm = self.comm.Split(self.MPI.UNDEFINED if color is None else color, key)
        return None if color is None else MpiEngine(self.MPI, comm, self._node_of)

    def free(self):
        """Collective."""
        self.comm.Free()

    def of_node(self):
        """The engine of the ranks on this rank's node. Collective."""
        if self.on_one_node:
            return self
        return self.split(next(i for i, node in enumerate(self.nodes) if self.rank in node), self.rank)

    def make_progress(self):
        """Let MPI hand out what it still holds of finished sends."""
        self.comm.Iprobe()

    def fence(self):
        """Order this rank's stores to shared memory, for processors that don't by themselves."""
        if MpiEngine._fence_window is None:
            MpiEngine._fence_window = self.MPI.Win.Create(None, comm=self.MPI.COMM_SELF)
            MpiEngine._fence_window.Lock_all()
        MpiEngine._fence_window.Sync()


def _row_bytes(x):
    return x.nbytes // len(x) if len(x) else 0


class Request:
    """A posted MPI operation; `then()` runs once, when it has completed. failed(error): what to raise for MPI's."""

    def __init__(self, engine, request, buffers, then=None, status=None, failed=lambda error: error):
        self.engine, self.request, self.buffers, self.then, self.status = engine, request, buffers, then, status
        self.failed = failed
        posted.add(self)

    def test(self):
        """True once finished; never waits."""
        if not self._ask(self.request.Test):
            return False
        self._finish()
        return True

    def _ask(self, call):
        try:
            return call(self.status)
        except self.engine.MPI.Exception as error:
            posted.discard(self)
            raise self.failed(error) from None

    def has_ended(self):
        """Whether MPI has done with the buffers, well or not; nothing else is done."""
        try:
            return self.request.Test()
        except self.engine.MPI.Exception:
            return True

    def wait(self, timeout=None):
        """Finish it. False if that took more than `timeout` seconds."""
        if timeout is None:
            self._ask(self.request.Wait)
            self._finish()
            return True
        limit = time.monotonic() + timeout
        while not self.test():
            if time.monotonic() > limit:
                return False
            time.sleep(1e-4)
        return True

    def _finish(self):
        posted.discard(self)
        if self.then is not None:
            self.then()
