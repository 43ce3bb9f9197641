"""Communicator: a group of ranks and everything they can say to each other. The only gateway to other ranks.

Every call has the same four parts: check the arguments, run the hooks and the ledger, choose the engine by where the
array lives, and do it now or hand back a Work.
"""

import pickle

import numpy as np

from minitorch_dist import ledger

from . import check
from .local import LocalEngine, aligned_zeros
from .mpi import INTERNAL_TAG
from .reduction import WIRE_BYTES, cut
from .shared import GRAIN, Window
from .state import state
from .work import Work


class Communicator:
    """`size` ranks, of which this process is `rank`.

    rank, size    as in MPI: ranks count from 0
    name          the axis under which the ledger counts
    world_ranks   the members' ranks in the world
    hooks         objects with before(op, x, peer) and after(op, x, peer), called around every operation, for
                  counting, checking, a simulated link or an injected fault. op: the method's name; x: the array that
                  holds the input or receives the data (None for a barrier); peer: the other rank, or the root of a
                  broadcast, else None. Of a posted operation, `after` comes when it has completed.

    Collectives are called by all ranks in the same order, with arrays of the same shape and dtype. Arrays are NumPy's,
    C-contiguous. An array made by `empty` is in the node's shared window, where reductions are several times faster
    than MPI's own; all ranks must then pass the same piece of it. Calls come from one thread at a time. With
    async_op=True a call returns a Work at once, and the arrays may not be touched until it has been waited for.
    """

    def __init__(self, engine, name, hooks=()):
        self.rank, self.size, self.world_ranks = engine.rank, engine.size, engine.world_ranks
        self.name = name
        self.hooks = list(hooks)
        self._engine = engine
        self._window = Window.open(engine) if engine.size > 1 else None

    def __repr__(self):
        return f"Communicator({self.name!r}, rank {self.rank} of {self.size})"

    def empty(self, shape, dtype):
        """A zeroed array, C-contiguous, 64-byte aligned, in the node's shared window where there is one. Collective."""
        x = None
        if self._window is not None and np.prod(shape, dtype=np.int64):
            x = self._window.empty(shape, dtype)
        return aligned_zeros(shape, dtype) if x is None else x

    def in_window(self, x):
        """True if the array lives in the shared window of this communicator."""
        return self._place(x) is not None

    # ------------------------------------------------------------ collectives

    def all_reduce(self, x, op="sum", async_op=False, exact=False):
        """x becomes the sum, mean, max or min of all ranks' x, in place and with the same bits on all ranks.

        exact=True (sum only): ((x0+x1)+(x2+x3))+…, the balanced tree in rank order, to the last bit, whatever the
        engine; the size must be a power of two. (Outside the window a posted exact reduction runs inside its `wait`.)
        """
        check.array("all_reduce", "x", x, written=True)
        check.reduction("all_reduce", x, op)
        if exact:
            check.exact("all_reduce", op, self.size)
        place = self._place(x)
        self._begin("all_reduce", x, None)
        if place is not None:
            first, last = cut(x.size, self.rank, self.size, GRAIN)
            self._count("all_reduce", x.nbytes, (last - first) * x.itemsize)
            return self._in_window(self._window.all_reduce(x, place, op), async_op, "all_reduce", (x,))
        self._count("all_reduce", x.nbytes, formula="all_reduce exact" if exact else "all_reduce")
        return self._do(lambda: self._engine.all_reduce(x, op, exact, async_op), async_op, "all_reduce", (x,))

    def reduce_scatter(self, out, x, op="sum", async_op=False):
        """out becomes this rank's N-th of the reduction of all ranks' x; x.size = N · out.size.

        x stays as it is, except where out is this rank's own part of it, which is allowed.
        """
        check.array("reduce_scatter", "out", out, written=True)
        check.array("reduce_scatter", "x", x)
        check.reduction("reduce_scatter", x, op)
        check.parts("reduce_scatter", "x", x, "out", out, self.size, self.rank)
        place = self._place(x)
        self._begin("reduce_scatter", x, None)
        self._count("reduce_scatter", x.nbytes, out.nbytes)
        if place is not None:
            request = self._window.reduce_scatter(out, x, place, op)
            return self._in_window(request, async_op, "reduce_scatter", (x, out))
        return self._do(lambda: self._engine.reduce_scatter(out, x, op, async_op),
                        async_op, "reduce_scatter", (x, out))

    def all_gather(self, out, x, async_op=False):
        """out becomes all ranks' x, one after the other; out.size = N · x.size. x may be this rank's part of out."""
        check.array("all_gather", "out", out, written=True)
        check.array("all_gather", "x", x)
        check.parts("all_gather", "out", out, "x", x, self.size, self.rank)
        place = self._place(out)
        self._begin("all_gather", x, None)
        self._count("all_gather", out.nbytes, x.nbytes)
        if place is not None:
            return self._in_window(self._window.all_gather(out, place, x), async_op, "all_gather", (x, out))
        return self._do(lambda: self._engine.all_gather(out, x, async_op), async_op, "all_gather", (x, out))

    def all_to_all(self, out, x, send_counts=None, recv_counts=None, async_op=False):
        """Rank i's j-th part of x becomes rank j's i-th part of out.

        The parts are `send_counts` rows of x and `recv_counts` rows of out (along the first axis, one number per
        rank); without counts they are equal.
        """
        check.array("all_to_all", "out", out, written=True)
        check.array("all_to_all", "x", x)
        send_counts, recv_counts = check.exchange(out, x, send_counts, recv_counts, self.size)
        self._begin("all_to_all", x, None)
        self._count("all_to_all", x.nbytes, x.nbytes * send_counts[self.rank] // max(len(x), 1))
        return self._do(lambda: self._engine.all_to_all(out, x, send_counts, recv_counts, async_op),
                        async_op, "all_to_all", (x, out))

    def broadcast(self, x, src=0, async_op=False):
        """x becomes rank src's x, in place."""
        check.array("broadcast", "x", x, written=self.rank != src)
        check.rank("broadcast", "src", src, self.size)
        self._begin("broadcast", x, src)
        self._count("broadcast", x.nbytes if self.rank == src else 0)
        return self._do(lambda: self._engine.broadcast(x, src, async_op), async_op, "broadcast", (x,), src)

    def barrier(self):
        """Return when all ranks have come here."""
        self._begin("barrier", None, None)
        self._count("barrier", 0)
        engine = self._engine if self._window is None else self._window
        self._do(engine.barrier, False, "barrier", (None,))

    # ------------------------------------------------------------ messages

    def send(self, x, dst, tag=0):
        """Send x to rank dst, who calls recv with the same tag, shape and dtype. May return before it has."""
        self._send("send", x, dst, tag, False)

    def isend(self, x, dst, tag=0):
        """Post a send; a Work."""
        return self._send("isend", x, dst, tag, True)

    def recv(self, x, src, tag=0):
        """Receive rank src's message with this tag into x. RuntimeError if it has another number of bytes."""
        self._recv("recv", x, src, tag, False)

    def irecv(self, x, src, tag=0):
        """Post a receive; a Work."""
        return self._recv("irecv", x, src, tag, True)

    def _send(self, call, x, dst, tag, async_op):
        check.array(call, "x", x)
        check.rank(call, "dst", dst, self.size, own=self.rank)
        check.tag(call, tag)
        return self._send_unchecked(call, x, dst, tag, async_op)

    def _send_unchecked(self, call, x, dst, tag, async_op):
        self._begin(call, x, dst)
        self._count("send", x.nbytes)
        return self._do(lambda: self._engine.send(x, dst, tag, async_op), async_op, call, (x,), dst)

    def _recv(self, call, x, src, tag, async_op):
        check.array(call, "x", x, written=True)
        check.rank(call, "src", src, self.size, own=self.rank)
        check.tag(call, tag)
        return self._recv_unchecked(call, x, src, tag, async_op)

    def _recv_unchecked(self, call, x, src, tag, async_op):
        self._begin(call, x, src)
        self._count("recv", x.nbytes)
        return self._do(lambda: self._engine.recv(x, src, tag, async_op), async_op, call, (x,), src)

    # ------------------------------------------------------------ Python objects, as pickled bytes over the calls above

    def broadcast_object(self, obj, src=0):
        """Rank src's object, on all ranks; what the others pass is ignored."""
        check.rank("broadcast_object", "src", src, self.size)
        data = _pickled(obj) if self.rank == src else None
        length = np.array([0 if data is None else data.size])
        self.broadcast(length, src)
        if data is None:
            data = np.empty(length[0], np.uint8)
        self.broadcast(data, src)
        return obj if self.rank == src else pickle.loads(data)

    def gather_object(self, obj, dst=0):
        """The list of all ranks' objects, in rank order, on rank dst; None on the others."""
        check.rank("gather_object", "dst", dst, self.size)
        data = _pickled(obj)
        lengths = self._all_lengths(data)
        if self.rank != dst:
            self._send_unchecked("send", data, dst, INTERNAL_TAG, False)
            return None
        objects = []
        for rank, length in enumerate(lengths):
            theirs = data if rank == dst else np.empty(length, np.uint8)
            if rank != dst:
                self._recv_unchecked("recv", theirs, rank, INTERNAL_TAG, False)
            objects.append(pickle.loads(theirs))
        return objects

    def all_gather_object(self, obj):
        """The list of all ranks' objects, in rank order, on all ranks."""
        data = _pickled(obj)
        lengths = self._all_lengths(data)
        padded = np.zeros(max(lengths), np.uint8)
        padded[:data.size] = data
        everything = np.empty((self.size, padded.size), np.uint8)
        self.all_gather(everything, padded)
        return [pickle.loads(row[:length]) for row, length in zip(everything, lengths, strict=True)]

    def _all_lengths(self, data):
        lengths = np.empty(self.size, np.int64)
        self.all_gather(lengths, np.array([data.size], np.int64))
        return [int(length) for length in lengths]

    # ------------------------------------------------------------ groups

    def split(self, color, key=None, name=None):
        """The communicator of all ranks that pass the same color, ordered by key (default: as here). Collective.

        color: an integer ≥ 0, or None for a rank that joins none and gets None. The default name is `NAME/COLOR`.
        The hooks of this communicator are copied.
        """
        if color is not None and (not isinstance(color, (int, np.integer)) or color < 0):
            raise ValueError(f"split: color={color!r} must be an integer ≥ 0, or None to join no group")
        engine = self._engine.split(color, self.rank if key is None else key)
        if engine is None:
            return None
        return Communicator(engine, f"{self.name}/{color}" if name is None else name, self.hooks)

    # ------------------------------------------------------------ the parts of every call

    def _place(self, x):
        return None if self._window is None else self._window.find(x)

    def _begin(self, op, x, peer):
        for hook in self.hooks:
            hook.before(op, x, peer)

    def _count(self, op, nbytes, share=None, formula=None):
        if ledger.open_ledgers:
            if share is None:   # the first and last byte of this rank's N-th
                first, last = cut(nbytes, self.rank, self.size)
                share = last - first
            ledger.message(self.name, op, WIRE_BYTES[formula or op](nbytes, share, self.size))

    def _do(self, start, async_op, op, buffers, peer=None):
        """Run or post an operation of the engine."""
        if async_op:
            return Work(self, op, buffers, peer, start())
        state.enter(self, op, buffers[0], peer)
        try:
            start()
        finally:
            state.leave()
        for hook in self.hooks:
            hook.after(op, buffers[0], peer)
        return None

    def _in_window(self, request, async_op, op, buffers):
        """Hand out, or finish, a request already posted in the window."""
        return self._do((lambda: request) if async_op else request.wait, async_op, op, buffers)


def world_of_one():
    """The communicator of a process that is alone."""
    return Communicator(LocalEngine(), "world")


def _pickled(obj):
    return np.frombuffer(pickle.dumps(obj, protocol=5), np.uint8)
