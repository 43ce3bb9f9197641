"""Arrays on GPUs between ranks: which way they go, and the way through the host.

    each rank owns a GPU                 NCCL, from GPU to GPU (comm/nccl.py)
    ranks share a GPU, or have no NCCL   staged: down to pinned memory, the host's engine, up again
    MINITORCH_CUDA_AWARE=1               MPI is handed the arrays as they are; it must be built for that

The first collective on a GPU array chooses, on all ranks alike. Messages (send, recv) are staged or MPI's own.
"""

import hashlib
import os
import platform

import numpy as np

from .. import backend
from .local import LocalEngine
from .state import Call, Like, state
from .work import Then

FIRST = "first_on_a_gpu"        # what is waited in until the ranks have chosen


def choose(engine):
    """The engine for arrays on GPUs of the ranks of `engine`. Collective, unless MPI was chosen by the environment."""
    if engine.size == 1:
        return LocalEngine()    # MPI would read the GPU's memory itself
    if cuda_aware():
        return CudaAware(engine)
    sharing = ranks_that_share(engine)
    if sharing:
        return Staged(engine, f"ranks {', '.join(map(str, sharing))} share a GPU, which NCCL refuses")
    from . import nccl
    missing = nccl.missing()
    everywhere = np.array([missing is None], np.int32)
    engine.all_reduce(everywhere, "min")
    if not everywhere[0]:
        return Staged(engine, missing or "another rank can't load NCCL")
    return nccl.NcclEngine(engine)


def cuda_aware():
    """Whether the user says that MPI reads and writes GPU memory."""
    return os.environ.get("MINITORCH_CUDA_AWARE") == "1"


def ranks_that_share(engine):
    """The ranks whose current GPU is also another rank's, by host and UUID: those of the first such GPU, or []."""
    runtime = backend.load_cupy().cuda.runtime
    gpu = platform.node().encode() + bytes(runtime.getDeviceProperties(runtime.getDevice())["uuid"])
    mine = np.frombuffer(hashlib.sha256(gpu).digest(), np.uint8)
    everyone = np.empty(mine.size * engine.size, np.uint8)
    engine.all_gather(everyone, mine)
    owners = {}
    for rank, gpu in enumerate(everyone.reshape(engine.size, -1)):
        owners.setdefault(gpu.tobytes(), []).append(rank)
    return next((ranks for ranks in owners.values() if len(ranks) > 1), [])


class OnDevices:
    """The part of a Communicator that finds the engine for an array by where it lives."""

    _gpu = None     # the engine for arrays on GPUs, as soon as there was one

    @property
    def gpu_path(self):
        """How collectives on GPU arrays travel and why: "staged: ranks 0, 1 share a GPU, …"; None before the first, and
        where a rank is alone."""
        return None if self._gpu is None or self.size == 1 else f"{self._gpu.path}: {self._gpu.reason}"

    def _engine_of(self, x):
        """Who runs a collective on this array. The first on a GPU is collective by itself, and waits for the other
        ranks where it is only posted, too: the guard is to know."""
        if backend.on_host(x):
            return self._engine
        if self._gpu is None:
            posted = state.call is None
            if posted:
                state.enter(Call(self, FIRST, Like.of(x)))
            try:
                self._gpu = choose(self._engine)
            finally:
                if posted:
                    state.leave()
        return self._gpu

    def _messenger_of(self, x):
        """Who carries a message with this array: without asking the other ranks."""
        if backend.on_host(x):
            return self._engine
        return CudaAware(self._engine) if cuda_aware() else Staged(self._engine, "a message")


# ---------------------------------------------------------------- through the host

def pinned(like):
    """An array of pinned memory, from CuPy's pool, for an array on a GPU: it is copied at the bus's full speed."""
    if not like.size:
        return np.empty(like.shape, like.dtype)
    memory = backend.load_cupy().cuda.alloc_pinned_memory(like.nbytes)
    return np.frombuffer(memory, like.dtype, like.size).reshape(like.shape)


def down(x):
    """A pinned copy of an array on a GPU; it has arrived when this returns."""
    host = pinned(x)
    if x.size:
        x.get(out=host)
    return host


def up(host, x):
    """Copy a pinned array into one on a GPU; done when this returns, so that the memory may be used again."""
    if x.size:
        x.set(host)
        backend.finish()


class Staged:
    """Every call by the host's engine, on pinned copies. `reason`: why arrays go this way."""

    path = "staged"

    def __init__(self, engine, reason):
        self.engine, self.reason = engine, reason
        self.rank, self.size = engine.rank, engine.size

    def _finish(self, request, async_op, *results):
        """Copy the results up, now or when the request has completed. results: (host array, array on the GPU)"""
        def copy():
            for host, x in results:
                up(host, x)
        if not async_op:
            return copy()
        return Then(request, copy)

    def all_reduce(self, x, op, exact=False, async_op=False):
        host = down(x)
        return self._finish(self.engine.all_reduce(host, op, exact, async_op), async_op, (host, x))

    def reduce(self, x, dst, op, async_op=False):
        host = down(x)
        return self._finish(self.engine.reduce(host, dst, op, async_op), async_op, *[(host, x)] * (self.rank == dst))

    def reduce_scatter(self, out, x, op, async_op=False):
        host = pinned(out)
        return self._finish(self.engine.reduce_scatter(host, down(x), op, async_op), async_op, (host, out))

    def all_gather(self, out, x, async_op=False):
        host = pinned(out)
        return self._finish(self.engine.all_gather(host, down(x), async_op), async_op, (host, out))

    def gather(self, out, x, dst, async_op=False):
        here = self.rank == dst
        host = pinned(out) if here else None
        return self._finish(self.engine.gather(host, down(x), dst, async_op), async_op, *[(host, out)] * here)

    def scatter(self, out, x, src, async_op=False):
        host, whole = pinned(out), down(x) if self.rank == src else None
        return self._finish(self.engine.scatter(host, whole, src, async_op), async_op, (host, out))

    def all_to_all(self, out, x, send_counts, recv_counts, async_op=False):
        host = pinned(out)
        request = self.engine.all_to_all(host, down(x), send_counts, recv_counts, async_op)
        return self._finish(request, async_op, (host, out))

    def broadcast(self, x, src, async_op=False):
        here = self.rank == src
        host = down(x) if here else pinned(x)
        return self._finish(self.engine.broadcast(host, src, async_op), async_op, *[(host, x)] * (not here))

    def send(self, x, dst, tag, async_op=False):
        return self._finish(self.engine.send(down(x), dst, tag, async_op), async_op)

    def recv(self, x, src, tag, async_op=False):
        host = pinned(x)
        return self._finish(self.engine.recv(host, src, tag, async_op), async_op, (host, x))


# ---------------------------------------------------------------- MPI itself

class CudaAware:
    """Every call by the host's engine, on the arrays themselves. MPI knows nothing of streams: what they hold must be
    there before it looks."""

    path, reason = "cuda-aware MPI", "MINITORCH_CUDA_AWARE=1"

    def __init__(self, engine):
        self.engine, self.rank, self.size = engine, engine.rank, engine.size
        self.staged = Staged(engine, "sums that aren't MPI's own")

    def _adds(self, x, exact=False):
        """The engine for a reduction. Exact sums, and those of narrow integers, are ours (comm/mpi.py): they are added
        up in the host's memory, between messages."""
        if exact or x.dtype.itemsize < 4:
            return self.staged
        backend.finish()
        return self.engine

    def all_reduce(self, x, op, exact=False, async_op=False):
        return self._adds(x, exact).all_reduce(x, op, exact, async_op)

    def reduce(self, x, dst, op, async_op=False):
        return self._adds(x).reduce(x, dst, op, async_op)

    def reduce_scatter(self, out, x, op, async_op=False):
        return self._adds(x).reduce_scatter(out, x, op, async_op)

    def __getattr__(self, name):
        call = getattr(self.engine, name)

        def synchronised(*args, **options):
            backend.finish()
            return call(*args, **options)
        return synchronised
