"""Numbers of few bits: real = (q - zero_point) · scale, with q an integer.

    params = params_of_range(-1.0, 3.0, bits=8)     # int8 affine, per tensor: scale 0.0157, zero point -64, …
    q = quantize(x, params)                         # int8
    dequantize(q, params)                           # within scale/2 of x, where x is inside of the range
    fake_quantize(x, params)                        # the same in one step, for training: a straight-through gradient

    q     -128 … -64 … 127      affine: the range of the data, moved so that 0 is one of the numbers
    real  -1.0    0    3.0
    q     -127 …  0  … 127      symmetric: the zero point is 0, the range the same on both sides

Numbers are rounded to the nearest, halves to the even one, and what lies outside of the range becomes its end. 0 is
always represented exactly: padding and ReLU depend on it.

Sources: Jacob et al. 2018, "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only
Inference"; Nagel et al. 2021, "A White Paper on Neural Network Quantization".
"""

from dataclasses import dataclass

from ..autodiff.ops.elementwise import select
from ..autodiff.primitive import Primitive, bind, lower
from ..backend import is_floating, whole, xp

BITS = range(2, 33)
WIDTHS = {2: 2, 3: 4, 4: 4, 5: 8, 6: 8, 7: 8, 8: 8}     # bits of a number -> bits that it is stored in
SMALLEST = 2.0 ** -126      # of float32 with all its digits: a finer scale would lose them


@dataclass(frozen=True, eq=False)
class QuantParams:
    """How numbers of few bits stand for real ones; print it.

    scale, zero_point  float32 and int32 arrays: of one element (0-d), or one per channel, (channels,)
    bits               2 to 32
    symmetric          the zero point is 0, and the most negative integer is left out: -(2^(bits-1) - 1) …
    axis               None: per tensor; else the axis of x along which the channels lie
    """

    scale: object
    zero_point: object
    bits: int = 8
    symmetric: bool = False
    axis: int | None = None

    def __post_init__(self):
        object.__setattr__(self, "bits", check_bits(self.bits))
        zero = xp.asarray(self.zero_point)
        if not ((zero == xp.rint(zero)) & (self.qmin <= zero) & (zero <= self.qmax)).all() \
                or self.symmetric and zero.any():
            raise ValueError(f"zero points {zero}: they must be " + ("0 where the range is symmetric" if self.symmetric
                             else f"whole numbers, {self.qmin} to {self.qmax}: one of the integers stands for 0"))
        for name, dtype in (("scale", xp.float32), ("zero_point", xp.int32)):
            values = xp.array(getattr(self, name), dtype)
            if values.ndim != (self.axis is not None):
                raise ValueError(f"{name} of shape {values.shape} with axis={self.axis}: per tensor it is one number, "
                                 "per channel one for each index along the axis")
            object.__setattr__(self, name, values)
        if self.scale.shape != self.zero_point.shape:
            raise ValueError(f"{self.scale.size} scales and {self.zero_point.size} zero points: as many of each")
        if not (xp.isfinite(self.scale).all() and (self.scale > 0).all()):
            raise ValueError(f"scales must be finite and more than 0, got {self.scale}")

    @property
    def qmin(self):
        """The least integer."""
        return -(1 << self.bits - 1) + self.symmetric

    @property
    def qmax(self):
        """The greatest integer."""
        return (1 << self.bits - 1) - 1

    @property
    def dtype(self):
        """What the integers are kept in when they are not packed."""
        return xp.dtype(xp.int8 if self.bits <= 8 else xp.int16 if self.bits <= 16 else xp.int32)

    @property
    def range(self):
        """(least, greatest) real number, float64, of the shape of `scale`."""
        scale = self.scale.astype(xp.float64)
        zero = self.zero_point.astype(xp.int64)
        return (self.qmin - zero) * scale, (self.qmax - zero) * scale

    def columns(self, x, dtype):
        """(scale, zero_point) in this dtype, of a shape that broadcasts against x. ValueError where x has another
        number of channels."""
        if self.axis is None:
            return self.scale.astype(dtype), self.zero_point.astype(dtype)
        if not -len(x.shape) <= self.axis < len(x.shape) or x.shape[self.axis] != self.scale.size:
            raise ValueError(f"an array of shape {tuple(x.shape)} has no {self.scale.size} channels along axis "
                             f"{self.axis}, of which there are scales")
        shape = [1] * len(x.shape)
        shape[self.axis] = -1
        return self.scale.astype(dtype).reshape(shape), self.zero_point.astype(dtype).reshape(shape)

    def __str__(self):
        low, high = self.range
        where = "per tensor" if self.axis is None else f"per channel (axis {self.axis}, {self.scale.size} of them)"
        return (f"int{self.bits} {'symmetric' if self.symmetric else 'affine'} {where}: scale {_span(self.scale)}, "
                f"zero point {_span(self.zero_point)}, range {low.min():.4g} … {high.max():.4g}")


def _span(values):
    """One number, or the least and the greatest of several."""
    if values.size == 1:
        return f"{values.item():.4g}"
    return f"{values.min():.4g} … {values.max():.4g}" if values.size else "none"


def check_bits(bits, most=BITS[-1]):
    """A number of bits, as an int. ValueError for one that there isn't, TypeError where it is no whole number."""
    bits = whole("bits", bits)
    if bits not in BITS or bits > most:
        raise ValueError(f"numbers of {bits} bits: it must be {BITS[0]} to {most}")
    return bits


def params_of_range(low, high, bits=8, symmetric=False, axis=None):
    """The QuantParams that just hold everything from `low` to `high` (numbers; with `axis`, arrays (channels,)).

    The range is widened to hold 0. Where it is nothing but 0, any scale will do, and it is 1. ValueError where it isn't
    finite.
    """
    bits = check_bits(bits)
    low, high = xp.asarray(low, xp.float64), xp.asarray(high, xp.float64)
    if not (xp.isfinite(low).all() and xp.isfinite(high).all() and (low <= high).all()):
        raise ValueError(f"a range from {_span(low)} to {_span(high)}: it must be finite, and begin before it ends")
    low, high = xp.minimum(low, 0.0), xp.maximum(high, 0.0)
    half = (1 << bits - 1) - 1
    step = xp.maximum(-low, high) / half if symmetric else (high - low) / (2 * half + 1)
    step = xp.where(step == 0, 1.0, xp.maximum(step, SMALLEST)).astype(xp.float32)
    zero = xp.zeros_like(step) if symmetric else xp.clip(xp.rint(-half - 1 - low / step), -half - 1, half)
    return QuantParams(step, zero, bits, symmetric, axis)


def levels_of(x, scale, zero_point, qmin, qmax):
    """The integers, as floating numbers; before they are moved into the range, and after it."""
    with xp.errstate(over="ignore"):        # an infinite quotient is the end of the range
        free = xp.rint(x / scale) + zero_point
    return free, xp.clip(free, qmin, qmax)


def quantize(x, params):
    """The integers of real numbers x (an array or Tensor; infinite ones become the ends of the range).

    Gives params.dtype, in the shape of x. ValueError for NaN, which no integer stands for.
    """
    x = lower(x)
    dtype = xp.result_type(x.dtype, xp.float64 if params.bits > 16 else xp.float32)
    _, levels = levels_of(x.astype(dtype, copy=False), *params.columns(x, dtype), params.qmin, params.qmax)
    if (bad := xp.isnan(levels)).any():
        raise ValueError(f"quantize: {int(bad.sum())} of {bad.size} values are NaN, which no integer stands for: look "
                         "for where they come from with mt.detect_anomaly()")
    return levels.astype(params.dtype)


def dequantize(q, params, dtype=xp.float32):
    """(q - zero_point) · scale, of a floating dtype."""
    scale, zero_point = params.columns(q, dtype)
    return (q - zero_point).astype(dtype, copy=False) * scale


def _fake_forward(x, scale, zero_point, qmin, qmax):
    real = (levels_of(x, scale, zero_point, qmin, qmax)[1] - zero_point) * scale
    return real.astype(x.dtype, copy=False) if is_floating(x.dtype) else real


def _inside(x, scale, zero_point, qmin, qmax):
    free, levels = levels_of(lower(x), scale, zero_point, qmin, qmax)
    return free == levels


# Not in the op table: its derivative isn't that of its steps, which is 0 almost everywhere.
_fake_quantize = Primitive("fake_quantize", _fake_forward, params="scale zero_point qmin qmax", listed=False,
                           x=(select, _inside))


def fake_quantize(x, params):
    """dequantize(quantize(x)) in x's dtype, with the straight-through gradient: 1 where x was rounded, 0 where it lay
    outside of the range (by more than the half step that rounds to its ends). NaN stays NaN.
    Source: Bengio et al. 2013, "Estimating or Propagating Gradients Through Stochastic Neurons"."""
    return bind(_fake_quantize, (x,), (*params.columns(x, _at_least_float32(x)), params.qmin, params.qmax))


def fake_round(x, scale, bits):
    """fake_quantize to multiples of `scale`, an array that broadcasts against x: what becomes of a bias, whose scale is
    the product of two others."""
    most = (1 << bits - 1) - 1
    return bind(_fake_quantize, (x,), (scale.astype(_at_least_float32(x)), 0, -most, most))


def _at_least_float32(x):
    """The dtype of scales: float16 has no room for small ones, nor for the integers of a bias."""
    return xp.promote_types(lower(x).dtype, xp.float32)


# ---------------------------------------------------------------- as bytes

def pack(q, bits):
    """Integers of `bits` bits as they are stored: int8 as it is; of 4 bits two in a byte, of 2 bits four, the first in
    the lowest bits (uint8, flat; 3 bits take 4)."""
    width = WIDTHS[bits]
    if width == 8:
        return q.astype(xp.int8)
    each = 8 // width
    flat = xp.zeros(-(-q.size // each) * each, xp.uint8)
    flat[:q.size] = q.reshape(-1).astype(xp.int8).view(xp.uint8) & (1 << width) - 1
    parts = flat.reshape(-1, each) << (xp.arange(each, dtype=xp.uint8) * width)
    return parts.sum(axis=1, dtype=xp.uint8)


def unpack(packed, bits, shape):
    """What `pack` was given, int8 of this shape."""
    width = WIDTHS[bits]
    if width == 8:
        return packed.reshape(shape)
    each, size = 8 // width, xp.prod(shape, dtype=xp.int64)
    up = 8 - width - xp.arange(each, dtype=xp.uint8) * width        # to the highest bits, then down with the sign
    flat = (packed[:, None] << up).view(xp.int8) >> (8 - width)
    return flat.reshape(-1)[:size].reshape(shape)
