"""Numbers rounded as IEEE and PTX ask, in NumPy, which has no fma and no rounding but to the nearest; and bfloat16."""

from fractions import Fraction

import numpy as np

U32, F32, F64 = np.dtype("u4"), np.dtype("f4"), np.dtype("f8")


def widened(x):
    """float32 of bfloat16's bits."""
    return (x.astype(U32) << 16).view(F32)


def narrowed(x):
    """bfloat16's bits of float32, rounded to nearest even."""
    bits = np.asarray(x, F32).view(U32)
    rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7fff, rounded).astype(np.uint16)


def flushed(x):
    """Subnormal numbers as zeros of their sign (.ftz)."""
    return np.where(np.abs(x) < np.finfo(x.dtype).tiny, np.copysign(x.dtype.type(0), x), x)


def saturated(x):
    """From 0 to 1, NaN as 0 (.sat)."""
    return np.where(x > 0, np.minimum(x, x.dtype.type(1)), x.dtype.type(0))


def odd(x):
    """float32 of float64 or integers, rounded to odd: rounded again, to bfloat16, it is as rounded once."""
    if x.dtype.kind in "iu":
        low = x & 0xfff         # of large ones: what float64 has no room for only says whether there is more
        x = np.where(np.abs(x.astype(F64)) < 2.0 ** 53, x, x - low + np.where(low != 0, 0x800, 0).astype(x.dtype))
    x = np.asarray(x, F64)
    near = x.astype(F32)
    wrong = (near.astype(F64) != x) & (near.view(U32) & 1 == 0) & ~np.isnan(x)
    return np.where(wrong, np.nextafter(near, np.where(x > near, np.inf, -np.inf).astype(F32)), near)


def fused(a, b, c, narrow=False):
    """a·b + c of float32, rounded once. The product is exact in float64; of the sum's error it is enough to know the
    direction: it breaks ties, and where the result is subnormal, more bits than float64's last (Boldo & Melquiond 2008,
    rounding to odd). narrow: the result is to be rounded to bfloat16, and is rounded to odd till then."""
    product, addend = np.multiply(a, b, dtype=F64), np.asarray(c, F64)
    total = product + addend
    bits = total.view(np.int64)
    delicate = ((bits & 0x1fffffff) == 0x10000000) | (np.abs(total) < 2.0 ** -126) | narrow
    if delicate.any():
        part = total - product
        error = (product - (total - part)) + (addend - part)
        away = np.where((error > 0) == (total > 0), 1, -1)
        odd_bits = np.where(delicate & (error != 0) & (bits & 1 == 0) & np.isfinite(total), bits + away, bits)
        total = odd_bits.view(F64)
    return odd(total) if narrow else total.astype(F32)


def directed(a, b, c, rounding):
    """a·b + c of float32, rounded once: down ("rm"), up ("rp") or towards zero ("rz")."""
    product, addend = np.multiply(a, b, dtype=F64), np.asarray(c, F64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    near = fused(a, b, c)
    missing = total - near                      # exact; of what total has lost, only the sign can matter
    return beside(near, np.where(missing != 0, missing, error), rounding)


def beside(near, beyond, rounding):
    """Of the nearest numbers to a result, and what it has beyond them, those that another rounding gives."""
    low, high = np.nextafter(near, near.dtype.type(-np.inf)), np.nextafter(near, near.dtype.type(np.inf))
    down, up = np.where(beyond < 0, low, near), np.where(beyond > 0, high, near)
    chosen = {"rn": near, "rm": down, "rp": up,
              "rz": np.where(near > 0, down, np.where(near < 0, up, near))}[rounding]
    return np.where(np.isfinite(near), chosen, near)


def two_sum(a, b):
    """(a + b, what it has lost), of float64."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def halves(a):
    """float64 as a sum of two numbers of 26 bits."""
    moved = (2.0 ** 27 + 1) * a
    upper = moved - (moved - a)
    return upper, a - upper


def two_product(a, b):
    """(a·b, what it has lost), of float64 below 2⁵⁰⁰ whose product is above 2⁻⁹⁰⁰ (Dekker 1971)."""
    total, (a, x), (b, y) = a * b, halves(a), halves(b)
    return total, ((a * b - total) + a * y + x * b) + x * y


def fused64(a, b, c, rounding="rn"):
    """a·b + c of float64, rounded once (Boldo & Melquiond 2008): all that float64 loses is kept, and of its last part,
    rounded to odd, at least whether there is more. Very large and very small numbers are Python's fractions."""
    a, b, c = (np.array(x) for x in np.broadcast_arrays(a, b, c))
    product, lost = two_product(a, b)
    upper, less = two_sum(c, lost)
    total, more = two_sum(product, upper)
    rest, least = two_sum(less, more)
    bits = rest.view(np.int64)
    away = np.where((least > 0) == (rest > 0), 1, -1)
    odd_rest = np.where((least != 0) & (bits & 1 == 0), bits + away, bits).view(F64)
    if rounding == "rn":
        out = total + odd_rest
    else:
        near, error = two_sum(total, rest)
        out = beside(near, np.where(error != 0, error, least), rounding)
    simple = (a == 0) | (b == 0) | ~np.isfinite(a) | ~np.isfinite(b) | ~np.isfinite(c)
    out = np.where(simple, a * b + c, out)
    extreme = ~simple & ((np.maximum(np.abs(a), np.abs(b)) > 2.0 ** 500) | (np.abs(product) < 2.0 ** -900)
                         | (np.abs(c) > 2.0 ** 1000))
    for i in map(tuple, np.argwhere(extreme)):
        out[i] = by_fractions(*(Fraction(float(x[i])) for x in (a, b, c)), rounding)
    return out


def by_fractions(a, b, c, rounding):
    """a·b + c of Fractions as float64."""
    exact = a * b + c
    try:
        near = float(exact)
        return beside(np.float64(near), (exact > near) * 1 - (exact < near) * 1, rounding)
    except OverflowError:
        away = rounding == "rn" or rounding == ("rp" if exact > 0 else "rm")
        return (1 if exact > 0 else -1) * (np.inf if away else np.finfo(F64).max)


def fma(a, b, c):
    """a·b + c of float16."""
    return (np.multiply(a, b, dtype=F64) + c).astype(a.dtype)
