"""Arithmetic on integers, as a processor without floating numbers does it: int8 · int8 in int32, and back to int8.

    real       y  =  Σ x·w + b                          x = (q_x - z_x)·s_x,  w = q_w·s_w,  b = q_b·s_x·s_w
    integers  acc =  Σ (q_x - z_x)·q_w + q_b            int32
    again     q_y =  z_y + round(acc · M)               M = s_x·s_w/s_y, an integer and a shift

NumPy's product of two int8 arrays is int8, and overflows without a word. Here the factors are carried to a floating
type in which each product and each partial sum is exact: float32 where K · greatest product ≤ 2²⁴, which for factors of
-128 … 127 and -127 … 127 is K ≤ 1032, float64 above. On a CPU its BLAS is also tens of times as fast as NumPy's loop
over integers.

Sources: Jacob et al. 2018, 2.2; for rounding once, TensorFlow Lite's TFLITE_SINGLE_ROUNDING.
"""

from dataclasses import dataclass

from ..autodiff.tensor import Tensor
from ..backend import xp
from .quantize import QuantParams, dequantize

INT32 = 2 ** 31 - 1


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """Integers, and what they stand for: what one layer of integers hands to the next.

    values  an integer array
    params  QuantParams, per tensor
    dtype   of the real numbers that the model works with
    """

    values: object
    params: QuantParams
    dtype: object

    @property
    def shape(self):
        """Of the integers."""
        return self.values.shape

    def dequantize(self):
        """The real numbers, a Tensor."""
        return Tensor(dequantize(self.values, self.params, self.dtype))


def exact_dtype(terms, product):
    """The floating dtype in which a sum of so many products, none greater than `product`, is exact in any order.
    OverflowError where there is none."""
    for dtype, most in ((xp.float32, 2 ** 24), (xp.float64, 2 ** 53)):
        if terms * product <= most:
            return dtype
    raise OverflowError(f"a sum of {terms} products of up to {product} is beyond 2^53, to which float64 counts")


def exactly(function, x, weight, terms, product):
    """function(x, weight), which sums up `terms` products of elements of the two, on integer arrays: int64, exact."""
    dtype = exact_dtype(terms, product)
    return function(x.astype(dtype), weight.astype(dtype)).astype(xp.int64)


def greatest(q):
    """The greatest magnitude in an integer array, a Python number. (NumPy's abs of int8 -128 is -128.)"""
    return max(int(q.max()), -int(q.min())) if q.size else 0


def integer_matmul(a, b):
    """a @ b of integer arrays (…, m, k) and (k, n), exact: int64. See above for how."""
    if a.dtype.kind not in "iu" or b.dtype.kind not in "iu":
        raise TypeError(f"integer_matmul of {a.dtype} and {b.dtype}: it multiplies integers")
    return exactly(xp.matmul, a, b, a.shape[-1], greatest(a) * greatest(b))


# ---------------------------------------------------------------- times a real number, in integers

def quantize_multiplier(real):
    """Positive real numbers as (multiplier, shift), int64 arrays: real = multiplier · 2^(shift - 31), with multiplier
    in [2^30, 2^31). The relative error is at most 2^-31. What is below 2^-32 is 0."""
    fraction, shift = xp.frexp(xp.asarray(real, xp.float64))
    multiplier = xp.floor(fraction * 2.0 ** 31 + 0.5).astype(xp.int64)
    full = multiplier == 2 ** 31
    multiplier, shift = xp.where(full, multiplier >> 1, multiplier), shift.astype(xp.int64) + full
    return xp.where(shift < -31, 0, multiplier), xp.where(shift < -31, 0, shift)


def rescale(acc, multiplier, shift):
    """round(acc · multiplier · 2^(shift - 31)) of int32 numbers, by integers alone: int64 arrays, which broadcast.

    Rounded once, halves up. (gemmlowp rounds the product first and its shift then, which for shifts of few bits is
    often one off.) Saturates at int32; for real factors below 2^30.
    """
    right = xp.maximum(31 - shift, 1)       # at most 62: the sum is below 2⁶³
    return xp.clip((acc * multiplier + (xp.int64(1) << right - 1)) >> right, -INT32 - 1, INT32)


def requantize(acc, real, params, dtype):
    """Accumulators of int32 whose unit is `real` · params.scale, as integers of `params`: clip(z + rescale(acc))."""
    levels = rescale(acc, *quantize_multiplier(real)) + int(params.zero_point)
    return QuantizedTensor(xp.clip(levels, params.qmin, params.qmax).astype(params.dtype), params, dtype)


def check_accumulator(name, q_weight, q_bias, params):
    """OverflowError unless the sums over the input channels of (q - z)·q_weight + q_bias fit into int32 whatever the
    input. q_weight (out, …), q_bias (out,) or None."""
    rows = q_weight.reshape(len(q_weight), -1).astype(xp.int64)
    up, down = xp.maximum(rows, 0).sum(axis=1), xp.minimum(rows, 0).sum(axis=1)
    first, last = params.qmin - int(params.zero_point), params.qmax - int(params.zero_point)
    bias = 0 if q_bias is None else q_bias.astype(xp.int64)
    high, low = up * last + down * first + bias, up * first + down * last + bias
    worst = max(int(high.max(initial=0)), -int(low.min(initial=0)))
    if worst > INT32:
        raise OverflowError(f"{name}: the accumulator may reach {worst:,} with {rows.shape[1]:,} products of "
                            f"{params.bits} and {greatest(q_weight).bit_length() + 1} bits, more than int32's "
                            f"{INT32:,}: use fewer bits, split the layer, or leave it in float (skip=[{name!r}])")
