"""Work on the host that takes NumPy longer than it must: many elementwise passes, choices, and running sums."""

from functools import wraps
from math import prod

import numpy as xp

from .dtypes import is_floating

# Elements per tile: 32 K of float32 are 128 KiB, and some arrays of them fit into a core's L2 cache.
TILE = 32_768
FEW = 4096          # elements for which one call of NumPy's is quicker than five
LONG = 1024         # running sums that pay for being added up side by side,
WIDE = 16           # of which so many lie side by side, too


def by_tiles(formula):
    """An elementwise formula of many passes, run on the host over one tile after the other: what one pass has written,
    the next finds in the cache. The arrays it is given and returns (one, or a tuple of these and None) have one shape;
    its other arguments are constants. The same bits."""
    @wraps(formula)
    def tiled(*args):
        first = args[0]
        if first.__class__ is not xp.ndarray or first.size <= TILE:
            return formula(*args)
        flat = [a.reshape(-1) if a.__class__ is xp.ndarray else a for a in args]
        whole = None
        for start in range(0, first.size, TILE):
            part = slice(start, start + TILE)
            made = formula(*[a[part] if a.__class__ is xp.ndarray else a for a in flat])
            several = made.__class__ is tuple
            parts = made if several else (made,)
            if whole is None:
                whole = [None if p is None else xp.empty(first.size, p.dtype) for p in parts]
            for array, p in zip(whole, parts, strict=True):
                if p is not None:
                    array[part] = p
        whole = [None if array is None else array.reshape(first.shape) for array in whole]
        return tuple(whole) if several else whole[0]
    return tiled


def choose(condition, x, y):
    """numpy.where(condition, x, y): x where the condition holds, else y.

    On the host by bits: numpy.where branches for each element, and where no pattern lets the processor foresee it,
    that takes ten times as long.
    """
    like = x if x.__class__ is xp.ndarray else y
    if (like.__class__ is not xp.ndarray or condition.__class__ is not xp.ndarray or condition.size < FEW
            or condition.dtype != bool or not is_floating(like.dtype) or not (_fits(x, like) and _fits(y, like))):
        return xp.where(condition, x, y)
    integer = f"i{like.itemsize}"
    x, y = (xp.asarray(value, like.dtype).view(integer) for value in (x, y))
    bits = xp.negative(condition, dtype=integer)       # all of them, or none
    if y.ndim or y:
        return (y ^ (bits & (x ^ y))).view(like.dtype)
    return (bits & x).view(like.dtype)


def running_sum(x, axis, backwards=False):
    """x.cumsum(axis), of floats in their own dtype, of integers and bools in 64 bits; backwards: from the end.

    NumPy makes one running sum after the other, each number of which waits for the one before it. On the host many are
    added up side by side, a place of all of them at a time, with the same bits in a sixth of the time.
    """
    if (x.__class__ is not xp.ndarray or not is_floating(x.dtype) or not x.size >= LONG * x.shape[axis] > 0
            or prod(x.shape[axis % x.ndim + 1:]) < WIDE):
        turn = (lambda array: xp.flip(array, axis)) if backwards else (lambda array: array)
        return turn(turn(x).cumsum(axis, x.dtype if is_floating(x.dtype) else None))
    sums = xp.empty(x.shape, x.dtype)
    of_place, added = (array.swapaxes(axis, 0)[::-1 if backwards else 1] for array in (sums, x))
    of_place[0] = added[0]
    for k in range(1, len(added)):
        xp.add(of_place[k - 1], added[k], out=of_place[k])
    return sums


def _fits(value, like):
    """Whether a value has the dtype of `like`, or is a number of Python's, which takes it (NEP 50)."""
    return value.dtype == like.dtype if value.__class__ is xp.ndarray else value.__class__ in (float, int, bool)
