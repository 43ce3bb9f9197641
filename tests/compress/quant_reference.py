"""Integer layers in plain Python, on nested lists of Python's integers, which have no end: no NumPy, none of our code.

The rescale is done by exact fractions.
"""

from fractions import Fraction
from itertools import product
from math import floor

INT32_MIN, INT32_MAX = -2 ** 31, 2 ** 31 - 1


def multiplier_of(real):
    """(multiplier, shift) of an exact positive rational: real = multiplier · 2^(shift - 31)."""
    shift = 0
    while real >= 1:
        real, shift = real / 2, shift + 1
    while real < Fraction(1, 2):
        real, shift = real * 2, shift - 1
    multiplier = int(real * 2 ** 31 + Fraction(1, 2))
    return (multiplier // 2, shift + 1) if multiplier == 2 ** 31 else (multiplier, shift)


def rescaled(acc, real):
    """round(acc · real), halves up."""
    multiplier, shift = multiplier_of(Fraction(real))
    if shift < -31:
        return 0
    return max(INT32_MIN, min(INT32_MAX, floor(acc * multiplier * Fraction(2) ** (shift - 31) + Fraction(1, 2))))


def to_grid(acc, real, scale, zero, low=-128, high=127):
    """An accumulator in units of `real` as an integer of another scale. `real` and `scale` are floats; their quotient
    is the one of double precision, as on the way to a device."""
    return max(low, min(high, zero + rescaled(acc, float(real) / float(scale))))


def regrid(acc, units, scale, zero):
    """[channel] of accumulators (nested lists, or numbers), each in its own unit, as integers of another scale."""
    return [each(lambda a, unit=unit: to_grid(a, unit, scale, zero), channel)
            for channel, unit in zip(acc, units, strict=True)]


def linear(x, zero, weight, bias):
    """x [k], weight [out][k] -> [out] of accumulators."""
    return [sum((a - zero) * b for a, b in zip(x, row, strict=True)) + c for row, c in zip(weight, bias, strict=True)]


def conv(x, zero, weight, bias, stride, padding, groups=1):
    """x [channels][h][w] -> [out][h'][w'] of accumulators; outside of x is the real number 0."""
    h, w, k = len(x[0]), len(x[0][0]), len(weight[0][0])
    inner, per_group = len(weight[0]), len(weight) // groups

    def at(c, i, j):
        return x[c][i][j] - zero if 0 <= i < h and 0 <= j < w else 0
    return [[[bias[o] + sum(at(o // per_group * inner + c, i * stride + u - padding, j * stride + v - padding)
                            * weight[o][c][u][v] for c, u, v in product(range(inner), range(k), range(k)))
              for j in range((w + 2 * padding - k) // stride + 1)] for i in range((h + 2 * padding - k) // stride + 1)]
            for o in range(len(weight))]


def windows(x, size, reduce, padding=0, outside=0):
    """Non-overlapping windows of each channel, reduced."""
    h, w = len(x[0]), len(x[0][0])
    return [[[reduce([channel[i][j] if 0 <= i < h and 0 <= j < w else outside
                      for i in range(a - padding, a - padding + size) for j in range(b - padding, b - padding + size)])
              for b in range(0, w + 2 * padding - size + 1, size)] for a in range(0, h + 2 * padding - size + 1, size)]
            for channel in x]


def each(f, x, *others):
    """f on every number of nested lists."""
    return [each(f, *parts) for parts in zip(x, *others, strict=True)] if isinstance(x, list) else f(x, *others)


def lowest(x, zero):
    """ReLU, on integers."""
    return each(lambda a: max(a, zero), x)
