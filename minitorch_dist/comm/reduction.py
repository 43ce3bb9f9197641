"""The arithmetic of a reduction, independent of the engine: operations, the tree, the slices, the bytes."""

import numpy as np

OPS = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum}   # a mean is a sum, divided once at the end

REDUCIBLE = frozenset(np.dtype(code) for code in ("f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"))


def tree_reduce(parts, combine, out, between):
    """out = ((p0+p1)+(p2+p3))+…, the balanced binary tree in rank order; `out` may be one of the parts, as an object.

    Returns where the sum stands: in `out`; of a single part, in that part. The left half has a power of two of parts,
    and the right half, maybe shorter, is a tree of its own: so any number of parts has one fixed order, three for
    instance (p0+p1)+p2. between: arrays for partial sums, one for each level but the last. The right half comes first:
    what is written last is then read again first, and `out` is written only when the parts but p0, p1 have been read.
    """
    if len(parts) == 1:
        return parts[0]
    if len(parts) == 2:
        return combine(parts[0], parts[1], out=out)
    half = 1 << (len(parts) - 1).bit_length() - 1
    right = tree_reduce(parts[half:], combine, between[0], between[1:])
    if right is out:
        np.copyto(between[0], right)
        right = between[0]
    return combine(tree_reduce(parts[:half], combine, out, between[1:]), right, out=out)


def scatter_along_tree(engine, out, x, async_op):
    """out = this rank's N-th of the sum of all ranks' x along the balanced tree: each part goes to the rank that it
    belongs to, which adds them up. A ring's bytes, and the bits of an exact all-reduce. Returns (what the engine says
    of the messages, the additions, to be made when these have come)."""
    parts, ones = np.empty_like(x).reshape(engine.size, -1), [1] * engine.size

    def add_up():
        between = [np.empty_like(parts[0]) for _ in range((engine.size - 1).bit_length() - 1)]
        tree_reduce(list(parts), np.add, out.reshape(-1), between)
    return engine.all_to_all(parts, x.reshape(engine.size, -1), ones, ones, async_op), add_up


def is_power_of_two(n):
    return n & (n - 1) == 0


def cut(n, rank, size, grain=1):
    """(first, last+1) of the rank's slice of n things; inner boundaries are multiples of `grain`."""
    first = n * rank // size // grain * grain
    last = n if rank + 1 == size else n * (rank + 1) // size // grain * grain
    return first, last


# Bytes that one rank puts on the wire. M: bytes of the whole vector (the larger of the two arrays), share: this
# rank's N-th of it. Summed over the ranks, an all_reduce moves 2(N-1)M: what a ring moves, and what the window's
# slices move (each rank reads its slice of N-1 others and writes N-1 copies of the result).
WIRE_BYTES = {
    "all_reduce": lambda M, share, N: 2 * (N - 1) * share,
    "all_reduce exact": lambda M, share, N: (N.bit_length() - 1) * M,    # log2 N exchanges of everything
    "reduce_scatter": lambda M, share, N: (N - 1) * share,
    "all_gather": lambda M, share, N: (N - 1) * share,
    "all_to_all": lambda M, share, N: M - share,                         # all but what stays here
    "broadcast": lambda M, share, N: M if N > 1 else 0,                  # on the root, 0 elsewhere
    "scatter": lambda M, share, N: (N - 1) * share,                      # on the root
    "reduce": lambda M, share, N: M if N > 1 else 0,                     # on all but the root: a tree's
    "gather": lambda M, share, N: M,                                     # on all but the root
    "send": lambda M, share, N: M,
    "recv": lambda M, share, N: 0,
    "barrier": lambda M, share, N: 0,
}
