"""The engine of a rank that is alone: nothing to send, results are copies."""

import numpy as np

CACHE_LINE = 64     # bytes


def aligned_zeros(shape, dtype):
    """A C-contiguous array of zeros whose first byte is a cache line's."""
    dtype = np.dtype(dtype)
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.zeros(nbytes + CACHE_LINE, np.uint8)
    first = -raw.ctypes.data % CACHE_LINE
    return raw[first:first + nbytes].view(dtype).reshape(shape)


class LocalEngine:
    """Every call returns None: finished at once."""

    rank, size, world_ranks, nodes = 0, 1, [0], [[0]]

    def all_reduce(self, x, op, exact, async_op):
        """A sum, mean or extremum over one rank is x itself."""

    def reduce_scatter(self, out, x, op, async_op):
        np.copyto(out.reshape(-1), x.reshape(-1))

    def all_gather(self, out, x, async_op):
        np.copyto(out.reshape(-1), x.reshape(-1))

    def all_to_all(self, out, x, send_counts, recv_counts, async_op):
        np.copyto(out, x)

    def reduce(self, x, dst, op, async_op):
        """A sum, mean or extremum over one rank is x itself."""

    def scatter(self, out, x, src, async_op):
        np.copyto(out.reshape(-1), x.reshape(-1))

    def gather(self, out, x, dst, async_op):
        np.copyto(out.reshape(-1), x.reshape(-1))

    def broadcast(self, x, src, async_op):
        """The only rank has it already."""

    def probe(self, tag):
        """Nobody sends."""

    def barrier(self):
        """Nobody to meet."""

    def split(self, color, key):
        return None if color is None else LocalEngine()

    def free(self):
        """There is nothing."""
