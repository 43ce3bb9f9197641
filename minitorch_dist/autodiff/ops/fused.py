"""Fused ops: a definition in ordinary ops, a kernel, and one pullback that makes all cotangents at once.

The kernel and the pullback run on raw arrays only. In forward mode, and when
backward is itself differentiated, the definition speaks, so a fused op is a
matter of speed alone; tests hold the two against each other in every mode.
"""

import math

from ...backend import (
    add_up,
    adds_in_float32,
    by_tiles,
    choose,
    functions,
    in_float32,
    is_half,
    is_short,
    tiled_cross_entropy,
    to_device_of,
    xp,
)
from ...backend.tiled_cross_entropy import counted_labels
from ..primitive import Primitive, bind, lower, state
from .elementwise import astype, erf, exp, floats, sigmoid, tanh, where
from .indexing import check_numbers, getitem, numbers_in
from .linalg import check_linear, linear, linear_forward, linear_pullback
from .reduction import largest, logsumexp, normal_axes, sum

# ---------------------------------------------------------------- softmax cross-entropy


def _picked(logits, labels):
    return getitem(logits, (xp.arange(len(labels), like=labels), labels))


def _xent_definition(logits, labels, ignore):
    counted, labels = counted_labels(labels, ignore)
    losses = logsumexp(logits, axis=1) - _picked(logits, labels)
    return losses if counted is None else where(counted, losses, 0.0)


def _xent_forward(logits, labels, ignore):
    counted, labels = counted_labels(labels, ignore)
    rows = xp.arange(len(labels), like=labels)
    z = logits - logits.max(axis=1, keepdims=True)      # so that exp can't overflow
    right = z[rows, labels]
    xp.exp(z, out=z)
    total = add_up(z, 1, True)
    z /= total
    losses = xp.log(total[:, 0]) - right
    # The losses, and softmax(logits) for backward.
    return losses if counted is None else choose(counted, losses, 0.0), z


def _xent_pullback(ct, wanted, labels, ignore, aux):
    counted, labels = counted_labels(labels, ignore)
    ct = ct if counted is None else choose(counted, ct, 0.0)
    g = aux * ct[:, None]
    g[xp.arange(len(labels), like=labels), labels] -= ct
    return (g,)


_xent = Primitive("softmax_cross_entropy", _xent_forward, "logits", "labels ignore", aux=True,
                  definition=_xent_definition, pullback=_xent_pullback)


def softmax_cross_entropy(logits, labels, ignore_index=None):
    """-log softmax(logits)[label] per sample: logits (n, classes) float, labels (n,) integers -> (n,), 0 where the
    label is ignore_index.

    Stable for any finite logits. d/dlogits = softmax(logits) - one_hot(label).
    Raises ValueError on shapes that don't fit and on labels outside of 0 … classes-1.
    """
    labels = numbers_in(labels)
    if len(logits.shape) != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(f"softmax_cross_entropy: logits {logits.shape} and labels {labels.shape}: "
                         "they must be (n, classes) and (n,)")
    check_numbers("softmax_cross_entropy", labels, logits.shape[1], "labels", "classes", ignore_index)
    return bind(_xent, (floats(logits),), (to_device_of(labels, lower(logits)), ignore_index))


# ---------------------------------------------------------------- the same of x Wᵀ, by tiles

def _tiled_xent_definition(x, weight, labels, ignore, wide, shares):
    logits = linear(x, weight)
    logits = astype(logits, xp.float32) if wide and is_short(logits.dtype) else logits
    if shares is None:
        return _xent_definition(logits, labels, ignore)
    return astype(shares.losses(logits, labels, ignore), logits.dtype)


_tiled_xent_forward, _tiled_xent_pullback = tiled_cross_entropy.rules(tiled_cross_entropy.sums,
                                                                      tiled_cross_entropy.slopes)
_tiled_xent = Primitive("linear_cross_entropy", _tiled_xent_forward, "x weight", "labels ignore wide shares", aux=True,
                        own_sums=True, definition=_tiled_xent_definition, pullback=_tiled_xent_pullback)


def linear_cross_entropy(x, weight, labels, ignore_index=None, shares=None):
    """softmax_cross_entropy(linear(x, weight), labels), whose logits never exist as a whole: x (n, in), weight
    (classes, in), labels (n,) integers -> (n,), 0 where the label is ignore_index. For many classes: kept for backward
    are 8 bytes per row, besides x and weight; backward makes the logits again.

    shares  whose share of the classes `weight` has, if not all: parallel.tensor.vocabulary.Shares; x's
            cotangent is then this rank's own
    Under autocast the products are made in 16 bits, and the losses in float32.
    ValueError on shapes that don't fit and on labels outside of 0 … classes-1. Source: Wijmans et al. 2024.
    """
    labels = numbers_in(labels)
    if (len(x.shape) != 2 or len(weight.shape) != 2 or x.shape[1] != weight.shape[1] or not weight.shape[0]
            or labels.shape != x.shape[:1]):
        raise ValueError(f"linear_cross_entropy: x {tuple(x.shape)}, weight {tuple(weight.shape)} and labels "
                         f"{tuple(labels.shape)}: they must be (n, in), (classes, in) and (n,), of a class or more")
    classes = weight.shape[0] if shares is None else shares.classes
    check_numbers("linear_cross_entropy", labels, classes, "labels", "classes", ignore_index)
    wide = state.autocast is not None
    return bind(_tiled_xent, (floats(x), weight), (to_device_of(labels, lower(x)), ignore_index, wide, shares))


# ---------------------------------------------------------------- softmax

def _softmax_definition(x, axis):
    e = exp(x - largest(lower(x), axis))
    return e / sum(e, axis, keepdims=True)


def _softmax_forward(x, axis):
    e = x - largest(x, axis)
    e = xp.exp(e, out=e) if e.ndim else xp.exp(e)
    e /= add_up(e, axis, True)
    return e


def _softmax_pullback(ct, wanted, ans, axis):
    g = ct * ans
    g -= ans * add_up(g, axis, True)
    return (g,)


_softmax = Primitive("softmax", _softmax_forward, "x", "axis",
                     definition=_softmax_definition, pullback=_softmax_pullback)


def softmax(x, axis=-1):
    """exp(x) / Σ exp(x) along `axis`, without overflow."""
    return bind(_softmax, (floats(x),), (normal_axes(axis, len(x.shape)),))


def _log_softmax_forward(x, axis):
    z = x - largest(x, axis)
    z -= xp.log(add_up(xp.exp(z), axis, True))
    return z


def _log_softmax_pullback(ct, wanted, ans, axis):
    g = xp.exp(ans)
    g *= add_up(ct, axis, True)
    return (ct - g,)


_log_softmax = Primitive(
    "log_softmax", _log_softmax_forward, "x", "axis", definition=lambda x, axis: x - logsumexp(x, axis, keepdims=True),
    pullback=_log_softmax_pullback)


def log_softmax(x, axis=-1):
    """log of softmax(x) along `axis`, without overflow."""
    return bind(_log_softmax, (floats(x),), (normal_axes(axis, len(x.shape)),))


# ---------------------------------------------------------------- gelu

INNER = math.sqrt(2 / math.pi)      # of the tanh form
CUBE = 0.044715


def _gelu_definition(x, approximate):
    if approximate:
        return 0.5 * x * (1 + tanh(INNER * (x + CUBE * (x * x * x))))
    return 0.5 * x * (1 + erf(x * math.sqrt(0.5)))


@by_tiles
def _gelu_forward(x, approximate):
    if approximate:
        share = x * x
        share *= CUBE
        share += 1
        share *= x
        share *= INNER
        share = xp.tanh(share)
    else:
        share = erf(x * math.sqrt(0.5))
    share += 1
    share *= 0.5
    return x * share, share         # share: the part of x that is let through


def _gelu_pullback(ct, wanted, x, approximate, aux):
    return _gelu_slope(ct, x, approximate, aux),


@by_tiles
def _gelu_slope(ct, x, approximate, share):
    square = x * x
    if approximate:     # tanh' = 1 - tanh² = 4·share·(1 - share)
        slope = square * (6 * CUBE * INNER) + 2 * INNER
        slope *= share - share * share
    else:               # the normal density
        square *= -0.5
        slope = xp.exp(square)
        slope *= 1 / math.sqrt(2 * math.pi)
    slope *= x
    slope += share
    slope *= ct
    return slope


_gelu = Primitive("gelu", _gelu_forward, "x", "approximate", aux=True, wide=True,
                  definition=_gelu_definition, pullback=_gelu_pullback)


def gelu(x, approximate="none"):
    """x·Φ(x), Φ the normal distribution; approximate="tanh": ½x(1 + tanh(√(2/π)(x + 0.044715 x³))), up to 5e-4 off and
    several times faster. Source: Hendrycks & Gimpel 2016."""
    return bind(_gelu, (floats(x),), (_by_tanh("gelu", approximate),))


def _by_tanh(name, approximate):
    if approximate not in ("none", "tanh"):
        raise ValueError(f"{name}: approximate={approximate!r}; use 'none' or 'tanh'")
    return approximate == "tanh"


# ---------------------------------------------------------------- gelu(x Wᵀ + b)

def as_op(function, x, *args, wide=is_half):
    """function(x, *args), rounded to 16 bits where an op by itself would be: one of arrays of which `wide` is true."""
    return in_float32(function, x, *args) if x.itemsize == 2 and wide(x) else function(x, *args)


def _linear_gelu_forward(x, weight, bias, approximate):
    u = as_op(linear_forward, x, weight, bias)
    y, share = as_op(_gelu_forward, u, approximate, wide=adds_in_float32)
    return y, (u, share)


def _linear_gelu_pullback(ct, wanted, x, weight, approximate, aux):
    u, share = aux
    ct = as_op(_gelu_slope, ct, u, approximate, share, wide=adds_in_float32)
    return as_op(lambda ct, x, weight: linear_pullback(ct, wanted, x, weight), ct, x, weight)


_linear_gelu = Primitive(
    "linear_gelu", _linear_gelu_forward, "x weight bias", "approximate", aux=True, own_sums=True,
    pullback=_linear_gelu_pullback,
    definition=lambda x, weight, bias, approximate: bind(_gelu, (linear(x, weight, bias),), (approximate,)))


def linear_gelu(x, weight, bias=None, approximate="none"):
    """gelu(x Wᵀ + b), to the bit gelu(linear(x, weight, bias)) on the CPU, in 16 bits as well: x (…, in), weight (out,
    in), bias (out) or None -> (…, out). See linear and gelu.

    Fused for GPUs: behind the product, one kernel adds the bias and applies GELU; backward likewise.
    """
    by_tanh = _by_tanh("linear_gelu", approximate)
    if bias is None:
        return bind(_gelu, (linear(x, weight),), (by_tanh,))
    check_linear("linear_gelu", x, weight, bias)
    return bind(_linear_gelu, (x, weight, bias), (by_tanh,))


# ---------------------------------------------------------------- silu(gate) · up

@by_tiles
def _swiglu_forward(gate, up):
    return gate * functions.sigmoid(gate) * up


def _swiglu_pullback(ct, wanted, gate, up):
    return _swiglu_slopes(ct, gate, up, *wanted)


@by_tiles
def _swiglu_slopes(ct, gate, up, for_gate, for_up):
    share = functions.sigmoid(gate)
    g = ct * share
    back = g * gate if for_up else None
    if for_gate:        # silu' = share · (1 + gate · (1 - share))
        g *= up
        g *= 1 + gate * (1 - share)
    return g if for_gate else None, back


_swiglu = Primitive("swiglu", _swiglu_forward, "gate up", wide=True,
                    pullback=_swiglu_pullback, definition=lambda gate, up: gate * sigmoid(gate) * up)


def swiglu(gate, up):
    """silu(gate) · up, elementwise, with silu(x) = x / (1 + exp(-x)); two arrays of one shape. Kept for backward are
    these two alone. ValueError for other shapes. Source: Shazeer 2020, "GLU variants improve transformer"."""
    if gate.shape != up.shape:
        raise ValueError(f"swiglu: gate {tuple(gate.shape)} and up {tuple(up.shape)} must have one shape")
    return bind(_swiglu, (floats(gate), floats(up)))
