"""The NCCL engine: collectives from GPU to GPU, for ranks that own one each. The only module that imports NCCL.

NCCL's kernels run on a stream of their own, beside the program's:

    program's stream   backward ─┬─ more of backward ───────┬─ optimizer step
                          ready ↓                          ↑ done
    NCCL's stream                └─ all-reduce ─────────────┘

Posting records `ready` and makes NCCL's stream wait for it; waiting makes the program's stream wait for `done`. The
program itself never waits: when a call has returned, what it does next with the array comes after the result. Each
communicator has a stream of its own; ranks call what they do by several in one order, or NCCL may hang.
"""

import sys
import time

import numpy as np

from .. import backend
from .device import Staged

TYPES = {"int8": "INT8", "uint8": "UINT8", "int32": "INT32", "uint32": "UINT32", "int64": "INT64", "uint64": "UINT64",
         "float16": "FLOAT16", "float32": "FLOAT32", "float64": "FLOAT64"}
OPERATIONS = {"sum": "SUM", "mean": "AVG", "max": "MAX", "min": "MIN"}


def missing():
    """Why NCCL can't be used here; None where it can."""
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        return f"NCCL can't be loaded ({error}): pip install nvidia-nccl-cu13 (or -cu12)"
    return None if nccl.available else "CuPy has found no NCCL: pip install nvidia-nccl-cu13 (or -cu12)"


class NcclEngine:
    """The ranks of `engine`, each on its current GPU. Making one is collective."""

    path, reason = "nccl", "every rank owns a GPU"

    def __init__(self, engine):
        from cupy.cuda import nccl
        self.nccl, self.cuda, self.engine = nccl, backend.load_cupy().cuda, engine
        self.rank, self.size = engine.rank, engine.size
        identifier = np.zeros(128, np.uint8)
        if self.rank == 0:
            identifier[:] = np.frombuffer(nccl.get_unique_id(), np.uint8)
        engine.broadcast(identifier, 0)
        self.comm = nccl.NcclCommunicator(self.size, identifier.tobytes(), self.rank)
        self.device, self.stream = self.cuda.Device(), self.cuda.Stream(non_blocking=True)
        # NCCL promises no order of a sum, and knows fewer dtypes.
        self.staged = Staged(engine, "exact sums, and dtypes that NCCL doesn't know")

    def _post(self, async_op, buffers, call):
        """Run call(stream) on NCCL's stream, after all that the program's stream holds. ValueError for an array of
        another GPU: NCCL would take its address for one of its own GPU's."""
        for x in buffers:
            if x is not None and x.device.id != self.device.id:
                raise ValueError(f"an array on {backend.device_of(x)}, but this communicator has been on cuda:"
                                 f"{self.device.id} since its first collective: copy the array there, or split off "
                                 "another communicator")
        with self.device:
            self.stream.wait_event(self.cuda.get_current_stream().record())
            call(self.stream.ptr)
            request = Request(self, self.stream.record(), buffers)
        if async_op:
            return request
        request.wait()
        return None

    def _of(self, x, op):
        return getattr(self.nccl, "NCCL_" + TYPES[x.dtype.name]), getattr(self.nccl, "NCCL_" + OPERATIONS[op])

    def all_reduce(self, x, op, exact=False, async_op=False):
        if exact or x.dtype.name not in TYPES:
            return self.staged.all_reduce(x, op, exact, async_op)
        return self._post(async_op, (x,), lambda stream: self.comm.allReduce(
            pointer(x), pointer(x), x.size, *self._of(x, op), stream))

    def reduce(self, x, dst, op, async_op=False):
        """(Where a rank isn't dst, NCCL doesn't touch the second pointer.)"""
        if x.dtype.name not in TYPES:
            return self.staged.reduce(x, dst, op, async_op)
        return self._post(async_op, (x,), lambda stream: self.comm.reduce(
            pointer(x), pointer(x), x.size, *self._of(x, op), dst, stream))

    def reduce_scatter(self, out, x, op, async_op=False):
        if x.dtype.name not in TYPES:
            return self.staged.reduce_scatter(out, x, op, async_op)
        return self._post(async_op, (out, x), lambda stream: self.comm.reduceScatter(
            pointer(x), pointer(out), out.size, *self._of(x, op), stream))

    # What is only moved travels as bytes, so that every dtype can.

    def all_gather(self, out, x, async_op=False):
        return self._post(async_op, (out, x), lambda stream: self.comm.allGather(
            pointer(x), pointer(out), x.nbytes, self.nccl.NCCL_INT8, stream))

    def broadcast(self, x, src, async_op=False):
        return self._post(async_op, (x,), lambda stream: self.comm.broadcast(
            pointer(x), pointer(x), x.nbytes, self.nccl.NCCL_INT8, src, stream))

    def gather(self, out, x, dst, async_op=False):
        places = [(rank, rank * x.nbytes, x.nbytes) for rank in range(self.size)] if self.rank == dst else []
        return self._exchange(async_op, (out, x), [(dst, 0, x.nbytes)], places)

    def scatter(self, out, x, src, async_op=False):
        places = [(rank, rank * out.nbytes, out.nbytes) for rank in range(self.size)] if self.rank == src else []
        return self._exchange(async_op, (out, x), places, [(src, 0, out.nbytes)])

    def all_to_all(self, out, x, send_counts, recv_counts, async_op=False):
        return self._exchange(async_op, (out, x), rows(x, send_counts), rows(out, recv_counts))

    def _exchange(self, async_op, buffers, sends, receives):
        """Messages that NCCL carries together; each is (peer, offset in bytes, bytes), none of 0 bytes."""
        out, x = buffers

        def call(stream):
            self.nccl.groupStart()
            try:
                for peer, offset, nbytes in sends:
                    if nbytes:
                        self.comm.send(pointer(x) + offset, nbytes, self.nccl.NCCL_INT8, peer, stream)
                for peer, offset, nbytes in receives:
                    if nbytes:
                        self.comm.recv(pointer(out) + offset, nbytes, self.nccl.NCCL_INT8, peer, stream)
            finally:        # or all that follows would be put into this group, and never begin
                self.nccl.groupEnd()
        return self._post(async_op, buffers, call)


def pointer(x):
    """Where an array's memory begins."""
    return x.data.ptr


def rows(x, counts):
    """[(peer, offset in bytes, bytes)] for so many rows of x to or from each rank."""
    each, offset, places = x.nbytes // max(len(x), 1), 0, []
    for peer, count in enumerate(counts):
        places.append((peer, offset, count * each))
        offset += count * each
    return places


class Request:
    """A posted operation: an event on NCCL's stream. It holds the arrays, whose memory must not go to others before."""

    def __init__(self, engine, done, buffers):
        self.engine, self.done, self.buffers = engine, done, buffers

    def test(self):
        """True once the arrays hold the result; never waits."""
        if not self.done.done:
            return False
        return self.wait()

    def wait(self, timeout=None):
        """Make the program's stream wait for the result. With a timeout the program itself waits: False if that took
        more than so many seconds."""
        limit = None if timeout is None else time.monotonic() + timeout
        while limit is not None and not self.done.done:
            if time.monotonic() > limit:
                return False
            time.sleep(1e-4)
        with self.engine.device:
            self.engine.cuda.get_current_stream().wait_event(self.done)
        self.buffers = None
        return True

    def __del__(self):
        """Of who drops it without a wait: what gets the arrays' memory next comes after the operation."""
        if self.buffers is not None and not sys.is_finalizing():
            self.wait()
