"""Normalisation, fused: layer_norm, rms_norm, batch_norm, with torch's arguments and defaults.

With x̂ = (x - mean)·r and r = 1/sqrt(var + eps), a cotangent g of x̂ gives

    x̄ = r·(g - mean(g) - x̂·mean(g·x̂)):

what g says about the mean and the scale of x is taken out, for x̂ doesn't know
them. Sources: Ba et al. 2016; Zhang & Sennrich 2019; Ioffe & Szegedy 2015.
"""

import math

from ...backend import add_up, adds_in_float32, finfo, in_float32, is_short, result_type, to_half, wholes, xp
from ..primitive import Primitive, bind
from .elementwise import astype, floats, rsqrt, wide
from .reduction import mean, var
from .shape import reshape


def _last(n):
    return tuple(range(-n, 0))


def _affine(y, weight, bias):
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _mean(x, axes):
    if x.itemsize == 2 and adds_in_float32(x):
        return to_half(x.mean(axis=axes, keepdims=True, dtype=xp.float32), x.dtype)
    return x.mean(axis=axes, keepdims=True)


def _sums(ct, normal, wanted, n):
    """The cotangents of weight and bias, whose axes are the last n."""
    lead = tuple(range(ct.ndim - n))
    return add_up(ct * normal, lead) if wanted[1] else None, add_up(ct, lead) if any(wanted[2:]) else None


# ---------------------------------------------------------------- layer norm

def _layer_definition(x, weight, bias, n, eps):
    axes = _last(n)
    return _affine((x - mean(x, axes, True)) * rsqrt(var(x, axes, True) + eps), weight, bias)


def _layer_forward(x, weight, bias, n, eps):
    axes = _last(n)
    normal = x - _mean(x, axes)
    r = 1 / xp.sqrt(_mean(normal * normal, axes) + eps)
    normal *= r
    return _affine(normal, weight, bias), (normal, r)


def _layer_pullback(ct, wanted, weight, n, aux):
    normal, r = aux
    gx = None
    if wanted[0]:
        axes, g = _last(n), ct if weight is None else ct * weight
        gx = g - _mean(g, axes)
        gx -= normal * _mean(g * normal, axes)
        gx *= r
    return gx, *_sums(ct, normal, wanted, n)


_layer_norm = Primitive("layer_norm", _layer_forward, "x weight bias", "n eps", aux=True, wide=True,
                        definition=_layer_definition, pullback=_layer_pullback)


def _trailing(name, x, normalized_shape, *others):
    """How many trailing axes `normalized_shape` names. ValueError unless x ends in it and the others have it."""
    shape = wholes("normalized_shape", normalized_shape)
    n = len(shape)
    if not n or x.shape[-n:] != shape or any(o is not None and o.shape != shape for o in others):
        raise ValueError(f"{name}: normalized_shape {shape} must be the last axes of x {x.shape} and the shape of the "
                         f"weights {[o.shape for o in others if o is not None]}")
    return n


def layer_norm(x, normalized_shape, weight=None, bias=None, eps=1e-5):
    """(x - mean) / sqrt(var + eps) · weight + bias, mean and variance over the last axes `normalized_shape` (an int or
    a tuple), of which shape weight and bias are."""
    n = _trailing("layer_norm", x, normalized_shape, weight, bias)
    return bind(_layer_norm, (x, weight, bias), (n, float(eps)))


# ---------------------------------------------------------------- RMS norm

def _rms_definition(x, weight, n, eps):
    return _affine(x * rsqrt(mean(x * x, _last(n), True) + eps), weight, None)


def _rms_forward(x, weight, n, eps):
    r = 1 / xp.sqrt(_mean(x * x, _last(n)) + eps)
    normal = x * r
    return (normal.copy() if weight is None else normal * weight), (normal, r)


def _rms_pullback(ct, wanted, weight, n, aux):
    normal, r = aux
    gx = None
    if wanted[0]:
        g = ct if weight is None else ct * weight
        gx = g - normal * _mean(g * normal, _last(n))
        gx *= r
    return gx, _sums(ct, normal, wanted, n)[0]


_rms_norm = Primitive("rms_norm", _rms_forward, "x weight", "n eps", aux=True, wide=True,
                      definition=_rms_definition, pullback=_rms_pullback)


def rms_norm(x, normalized_shape, weight=None, eps=None):
    """x / sqrt(mean(x²) + eps) · weight over the last axes `normalized_shape`; eps defaults to the dtype's."""
    n = _trailing("rms_norm", x, normalized_shape, weight)
    x = floats(x)
    return bind(_rms_norm, (x, weight), (n, float(finfo(x.dtype).eps if eps is None else eps)))


# ---------------------------------------------------------------- batch norm

def _over(x):
    """Batch norm's axes, and the shape of one number per channel among them."""
    return (0, *range(2, len(x.shape))), (x.shape[1],) + (1,) * (len(x.shape) - 2)


def _batch_definition(x, weight, bias, eps):
    kind = result_type(*(a.dtype for a in (x, weight, bias) if a is not None))
    x, weight, bias = (None if a is None else wide(a) for a in (x, weight, bias))
    axes, column = _over(x)
    m, v = mean(x, axes), var(x, axes)
    y = (x - reshape(m, column)) * reshape(rsqrt(v + eps), column)
    return astype(_affine(y, *(None if w is None else reshape(w, column) for w in (weight, bias))), kind), m, v


def _batch_forward(x, weight, bias, eps):
    """(y, mean, var), the latter two of 16 bits in float32, for backward: a variance may be beyond float16's range, and
    a mean's rounding as large as what is left without it."""
    if x.itemsize != 2 or not adds_in_float32(x):
        return _normalised(x, weight, bias, eps)
    statistics = []

    def normalised(*args):
        y, *statistics[:] = _normalised(*args, eps)
        return y
    return in_float32(normalised, x, weight, bias), *statistics


def _normalised(x, weight, bias, eps):
    axes, column = _over(x)
    m = _mean(x, axes)
    y = x - m
    v = _mean(y * y, axes)
    y *= 1 / xp.sqrt(v + eps)
    m, v = m.reshape(-1), v.reshape(-1)
    weight, bias = (None if w is None else w.reshape(column) for w in (weight, bias))
    if any(w is not None and w.dtype != y.dtype for w in (weight, bias)):
        return _affine(y, weight, bias), m, v
    if weight is not None:
        y *= weight
    if bias is not None:
        y += bias
    return y, m, v


def _batch_pullback(ct, wanted, ans, x, weight, eps):
    (_, m, v), (cy, cm, cv) = ans, ct.parts

    def slopes(cy, x, weight):
        return _slopes(cy, cm, cv, wanted, m, v, x, weight, eps)
    return in_float32(slopes, cy, x, weight) if x.itemsize == 2 and adds_in_float32(x) else slopes(cy, x, weight)


def _slopes(cy, cm, cv, wanted, m, v, x, weight, eps):
    axes, column = _over(x)
    centred = x - m.reshape(column)
    r = (1 / xp.sqrt(v + eps)).reshape(column)
    n = x.size // x.shape[1]
    gx = gw = gb = None
    if cy is not None:
        normal = centred * r
        gb, gw = add_up(cy, axes), add_up(cy * normal, axes)
        gx = cy - (gb / n).reshape(column)
        gx -= normal * (gw / n).reshape(column)
        gx *= r if weight is None else r * weight.reshape(column)
    else:
        gx, gw, gb = xp.zeros_like(x), *(None if w is None else xp.zeros_like(w) for w in (weight, weight))
    if cm is not None:
        gx += (cm / n).reshape(column)
    if cv is not None:
        gx += centred * (cv * (2 / n)).reshape(column)
    return gx, gw if wanted[1] else None, gb if wanted[2] else None


_batch_norm = Primitive("batch_norm", _batch_forward, "x weight bias", "eps", multi=True, own_sums=True,
                        definition=_batch_definition, pullback=_batch_pullback)


def batch_norm(x, weight=None, bias=None, eps=1e-5):
    """(y, mean, var): x (n, channels, …) normalised per channel by the batch's own mean and (biased) variance, which
    are returned for running statistics, (channels,) each; y = (x - mean) / sqrt(var + eps) · weight + bias.

    torch keeps its running variance unbiased: var · count / (count - 1) with count = x.size / channels.
    """
    if len(x.shape) < 2 or any(w is not None and w.shape != x.shape[1:2] for w in (weight, bias)):
        raise ValueError(f"batch_norm: x {x.shape} must be (n, channels, …), and the weights "
                         f"{[w.shape for w in (weight, bias) if w is not None]} of shape (channels,)")
    if not math.prod(x.shape):
        raise ValueError(f"batch_norm: x {x.shape} is empty, so it has no mean")
    y, *statistics = bind(_batch_norm, (x, weight, bias), (float(eps),))
    return y, *(astype(s, y.dtype) if is_short(y.dtype) else s for s in statistics)
