"""Whether some of an array of integers lie out of range: labels and indices, looked at where they are, for an error
that comes later (backend.refuse).

    bad = any of numbers[i] with not low <= numbers[i] < high and numbers[i] != other

One program reads them all, 8 bytes per number: at most MOST of them, for it reads as one multiprocessor does. Where
there are more, CuPy takes two launches, a comparison and any, and two more where one number is let through.
"""

import numpy as np
import triton
import triton.language as tl

from . import launch
from .kernel import Kernel

MOST = 1 << 16


@triton.jit
def _outside(numbers, bad, low, high, other, n, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    found = tl.zeros((BLOCK,), tl.int32)
    for first in tl.range(0, n, BLOCK, num_stages=2):
        # Unsigned numbers from 2⁶³ up become negative: out of range, where low isn't.
        x = tl.load(numbers + first + lanes, mask=first + lanes < n, other=0).to(tl.int64)
        wrong = ((x < low) | (x >= high)) & (x != other) & (first + lanes < n)
        found = tl.maximum(found, wrong.to(tl.int32))
    tl.store(bad, tl.max(found, axis=0) > 0)


def definition(numbers, low, high, other=None):
    """The same in NumPy."""
    return np.array(any(not low <= x < high and x != other for x in numbers.ravel().tolist()))


OUTSIDE = Kernel("outside", _outside, {"numbers": "*", "bad": "*i1", "low": "i64", "high": "i64", "other": "i64",
                                       "n": "i32"},
                 {"BLOCK": 2048}, divisible=("n",), num_warps=8,
                 examples=({"*": "i64"}, {"*": "i32"}, {"*": "u8"}))
KERNELS = (OUTSIDE,)


def fits(numbers, other=None):
    """Whether the kernel can take so many numbers, and let `other` through."""
    return 0 < numbers.size <= MOST and (other is None or -2 ** 63 <= other < 2 ** 63)


def outside(numbers, low, high, other=None):
    """0-d bool: whether some of these integers of any shape, for which it fits, are below `low`, or `high` or above,
    and not `other`."""
    bad = launch.empty((), np.bool_, numbers)
    if numbers.dtype.kind == "u":
        low = max(low, 0)
        other = low if other is not None and other < 0 else other       # it is none of them
    if other is None and low >= high:       # none is allowed, and so none can stand for `other`
        bad[...] = True
    else:
        OUTSIDE((1,), launch.contiguous(numbers), bad, low, high, low if other is None else other, numbers.size)
    return bad
