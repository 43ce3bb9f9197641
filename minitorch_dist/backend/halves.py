"""float16 to float32 and back, on the host, in a half to a fiftieth of the time that NumPy takes, to the same bits.

NumPy converts one number after the other, and those below float16's least normal one, 2⁻¹⁴, in 10 to 60 nanoseconds
each: gradients often are. So it is done with whole arrays: from 16 bits by a table of all that there are, to them by an
addition. The processor rounds a sum to the last place of the larger number. So x is added to the power of two whose
last place, in float32, is that of x in float16, and what the sum's bits have more than the power's is x in such places:

    exponent e of x, at least -14     x + 2^(e + 13) = (2²³ + n) · 2^(e - 10)      n: 1,024 to 2,048, below 2⁻¹⁴ from 0
    float16's bits                    (e + 14) · 2¹⁰ + n                           n = 2,048: the next e, or inf
"""

import functools

import numpy as xp

from .dtypes import is_bfloat16
from .passes import by_tiles

FLOAT16 = xp.dtype(xp.float16)
SEVERAL = 256       # numbers: of fewer NumPy's way is the quicker one, or nearly
INF, INF_16 = 0x7F800000, 0x7C00        # their bits: those of numbers are below, those of NaN above


@functools.cache
def _values():
    """Of each float16, by its bits: float32 (65,536,)."""
    return xp.arange(1 << 16, dtype=xp.uint16).view(FLOAT16).astype(xp.float32)


def _made(x, dtype, formula):
    """formula(x) in an array of its own, in x's order, as astype makes them: of a view nobody knows the order."""
    out = xp.empty_like(x, dtype)
    out[...] = formula(x.T).T if x.flags.f_contiguous else formula(x)
    return out


@by_tiles
def _wide(x):
    return _values().take(x.view(xp.uint16))


def to_float32(x):
    """x.astype(np.float32) of a raw array."""
    if x.__class__ is not xp.ndarray or x.dtype != FLOAT16 or x.size < SEVERAL:
        return x.astype(xp.float32)
    return _made(x, xp.float32, _wide)


def to_half(x, dtype=FLOAT16):
    """x.astype(dtype), one of 16 bits; what is too large becomes inf without a warning, for optim.GradScaler to see.
    float64 becomes bfloat16 by way of float32, as in torch."""
    if x.__class__ is xp.ndarray and x.dtype == xp.float32 and dtype == FLOAT16 and x.size >= SEVERAL:
        return _made(x, FLOAT16, _rounded)
    with xp.errstate(over="ignore"):
        if x.dtype == xp.float64 and is_bfloat16(dtype):        # ml_dtypes does so before 0.7 alone
            x = x.astype(xp.float32)
        return x.astype(dtype)


@by_tiles
def _rounded(x):
    bits = x.view(xp.uint32)
    n = bits & 0x7FFFFFFF
    if n.max(initial=0) > INF:      # NaN keeps its payload
        with xp.errstate(over="ignore"):
            return x.astype(FLOAT16)
    power = n & INF
    xp.maximum(power, 127 - 14 << 23, out=power)
    power += 13 << 23               # of the largest it wraps around; they end as inf all the same
    total = n.view(xp.float32)
    total += power.view(xp.float32)
    n -= power
    power >>= 13
    n += power
    n -= 127 - 1 << 10
    xp.minimum(n, INF_16, out=n)
    n |= bits >> 16 & 0x8000
    return n.astype(xp.uint16).view(FLOAT16)
