"""Functions that NumPy hasn't, or takes long for, of raw arrays on any device."""

import numpy as xp

from .dtypes import is_floating
from .passes import FEW, by_tiles, choose
from .products import in_float32

# Float32: erf = tanh(x·P(x²)), within 2.6e-7. P is about artanh(erf(x))/x, with the coefficients that leave the least
# relative error of erf, 1e-8, up to 4.5; from there on it is 1. (By Lawson's weights on Chebyshev polynomials.)
_ERF_P = (1.87539615e-10, -8.78095398e-9, 1.60518030e-7, -1.31993699e-6, 1.44669186e-6, 6.90653684e-5, -5.95024514e-4,
          -2.06798572e-4, 1.02772191e-1, 1.12837918)
# Float64: below 0.46875 erf = x·A(x²)/B(x²), above it 1 - exp(-x²)·C(|x|)/D(|x|), within 5e-16. Source: Cody 1969,
# "Rational Chebyshev approximations for the error function".
_ERF_A = (1.85777706184603153e-1, 3.16112374387056560e0, 1.13864154151050156e2, 3.77485237685302021e2,
          3.20937758913846947e3)
_ERF_B = (1.0, 2.36012909523441209e1, 2.44024637934444173e2, 1.28261652607737228e3, 2.84423683343917062e3)
_ERF_C = (2.15311535474403846e-8, 5.64188496988670089e-1, 8.88314979438837594e0, 6.61191906371416295e1,
          2.98635138197400131e2, 8.81952221241769090e2, 1.71204761263407058e3, 2.05107837782607147e3,
          1.23033935479799725e3)
_ERF_D = (1.0, 1.57449261107098347e1, 1.17693950891312499e2, 5.37181101862009858e2, 1.62138957456669019e3,
          3.29079923573345963e3, 4.36261909014324716e3, 3.43936767414372164e3, 1.23033935480374942e3)


def _polynomial(coefficients, x):
    total = x * coefficients[0] + coefficients[1]
    for c in coefficients[2:]:
        total *= x
        total += c
    return total


def _between(x, low, high):
    """x, at least low and at most high. (With a number, NumPy's maximum takes as long as three of its clip.)"""
    return xp.clip(x, low, high) if x.__class__ is xp.ndarray else xp.minimum(xp.maximum(x, low), high)


def relu(x):
    """max(x, 0), of -0 too 0."""
    if x.__class__ is not xp.ndarray or x.dtype.kind != "f" or x.itemsize == 2 or x.size < FEW:
        return xp.maximum(x, 0)
    y = _between(x, 0, xp.inf)
    y += 0.0        # -0, which clip leaves as it is, becomes 0
    return y


@by_tiles
def erf(x):
    """2/√π ∫₀ˣ exp(-t²) dt; of integers in float64."""
    if not hasattr(x, "dtype"):
        return erf(xp.float64(x))       # a number
    if not is_floating(x.dtype):
        return erf(x.astype(xp.float64))
    if x.itemsize == 2:     # the coefficients are beyond float16's range
        return in_float32(erf, x)
    if x.dtype == xp.float32:
        y = _between(x, -4.5, 4.5)
        return xp.tanh(y * _polynomial(_ERF_P, y * y))
    y = xp.minimum(xp.absolute(x), 6.0)     # beyond 6 erf is 1 to the last bit
    z = y * y
    small = y * _polynomial(_ERF_A, z) / _polynomial(_ERF_B, z)
    large = 1 - xp.exp(-z) * _polynomial(_ERF_C, y) / _polynomial(_ERF_D, y)
    return xp.copysign(choose(y < 0.46875, small, large), x)


def power(x, y):
    """x to the y; to whole powers by products, or by |x|: of negative numbers NumPy takes 44 ns each."""
    if y.__class__ not in (float, int) or y in (-1, 0, 1, 2) or y != y // 1 or not hasattr(x, "dtype") \
            or not is_floating(x.dtype) or x.itemsize == 2:
        return xp.power(x, y)
    if y in (3, 4):
        square = x * x
        return square * (x if y == 3 else square)
    out = xp.power(xp.absolute(x), y)
    return xp.copysign(out, x) if y % 2 else out


@by_tiles
def sigmoid(x):
    """1 / (1 + exp(-x)); of integers and bools in float64."""
    if hasattr(x, "dtype") and not is_floating(x.dtype):
        x = x.astype(xp.float64)        # of numbers without sign -|x| would be a large one
    # 1 / (1 + e) from 0 up, e / (1 + e) below: it never overflows, and keeps its digits on both sides.
    e = xp.exp(-xp.absolute(x))
    return xp.maximum(e, xp.sign(x)) / (1 + e)
