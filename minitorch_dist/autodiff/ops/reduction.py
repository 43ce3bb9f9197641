"""Reductions, and broadcasting, which is a sum's transpose."""

from ...backend import xp
from ..primitive import LinearOp, Primitive, bind, lower
from .elementwise import astype, sqrt
from .shape import reshape

# ---------------------------------------------------------------- linear maps

summed = LinearOp("sum", lambda t, r: sum(t, r[1], r[2]), lambda c, r: spread(c, r[0], r[1]))
broadcasted = LinearOp("broadcast", lambda t, r: broadcast_to(t, r[1]), lambda c, r: unbroadcast(c, r[0]))
weighted = LinearOp("weighted sum", lambda t, r: sum(t * r[0], r[2], r[3]), lambda c, r: spread(c, r[1], r[2]) * r[0])


def kept(shape, axes):
    """`shape` with extent 1 at `axes`: what keepdims=True leaves."""
    if axes is None:
        return (1,) * len(shape)
    axes = axes if isinstance(axes, tuple) else (axes,)
    return tuple(1 if i in axes else extent for i, extent in enumerate(shape))


def spread(c, shape, axes):
    """Copy a reduction's cotangent to all elements that were summed: the transpose of sum."""
    if axes is not None and c.shape != kept(shape, axes):
        c = reshape(c, kept(shape, axes))
    return broadcast_to(c, shape)


def unbroadcast(c, shape):
    """Add up what broadcasting `shape` to c.shape had copied: the transpose of broadcast_to."""
    lead = len(c.shape) - len(shape)
    axes = tuple(range(lead)) + tuple(i + lead for i, extent in enumerate(shape) if extent == 1 != c.shape[i + lead])
    if axes:
        c = sum(c, axes)
    return c if c.shape == shape else reshape(c, shape)


# ---------------------------------------------------------------- primitives

def _filled(x, old, new):
    # A real array of its own, not a read-only view of stride 0: and 8 times cheaper than np.broadcast_to.
    out = xp.empty(new, x.dtype, like=x) if isinstance(x, xp.ndarray) else xp.empty(new, x.dtype)
    out[...] = x
    return out


def _tie_weights(ans, x, axes):
    """Of every maximum that several elements share, each gets an equal part."""
    x, ans = lower(x), lower(ans)
    winners = (x == ans.reshape(kept(x.shape, axes))).astype(x.dtype)
    return winners / winners.sum(axis=axes, keepdims=True)


_sum = Primitive("sum", lambda x, shape, axes, keepdims: x.sum(axis=axes, keepdims=keepdims),
                 params="shape axes keepdims", x=(summed, "shape axes keepdims"))
_broadcast = Primitive("broadcast_to", _filled, params="old new", x=(broadcasted, "old new"))


def _extremum(name, method):
    return Primitive(
        name, lambda x, shape, axes, keepdims: getattr(x, method)(axis=axes, keepdims=keepdims),
        params="shape axes keepdims",
        x=(weighted, lambda ans, x, shape, axes, keepdims: (_tie_weights(ans, x, axes), shape, axes, keepdims)))


_max = _extremum("max", "max")
_min = _extremum("min", "min")
_argmax = Primitive("argmax", lambda x, axis: x.argmax(axis=axis), params="axis")


def normal_axes(axis, ndim):
    """An axis argument as None, one non-negative int (NumPy is faster so) or a sorted tuple of several."""
    if axis is None or (axis.__class__ is int and 0 <= axis < ndim):
        return axis
    axes = axis if isinstance(axis, (tuple, list)) else (axis,)
    if any(not -ndim <= a < ndim for a in axes):
        raise ValueError(f"axis {axis} is out of range for {ndim} axes")
    axes = tuple(sorted(a % ndim for a in axes))
    if len(set(axes)) != len(axes):
        raise ValueError(f"axis {axis} names an axis twice")
    return axes[0] if len(axes) == 1 else axes


# ---------------------------------------------------------------- what users call

def sum(x, axis=None, keepdims=False):
    """The sum over `axis` (None: all; an int; a tuple), of x's dtype."""
    shape = x.shape
    return bind(_sum, (x,), (shape, normal_axes(axis, len(shape)), keepdims))


def count(shape, axes):
    """How many elements a reduction of `shape` over `axes` adds up."""
    n = 1
    for i, extent in enumerate(shape):
        if axes is None or i == axes or (isinstance(axes, tuple) and i in axes):
            n *= extent
    return n


def mean(x, axis=None, keepdims=False):
    """The mean over `axis`."""
    return sum(x, axis, keepdims) / count(x.shape, normal_axes(axis, len(x.shape)))


def var(x, axis=None, keepdims=False, correction=0):
    """The variance over `axis`: mean squared distance from the mean, divided by count - correction (NumPy: 0)."""
    centred = x - mean(x, axis, keepdims=True)
    return sum(centred * centred, axis, keepdims) / (count(x.shape, normal_axes(axis, len(x.shape))) - correction)


def std(x, axis=None, keepdims=False, correction=0):
    """The square root of var; its gradient is infinite where all elements are equal."""
    return sqrt(var(x, axis, keepdims, correction))


def max(x, axis=None, keepdims=False):
    """The largest element over `axis`; elements that tie share the gradient equally."""
    return bind(_max, (x,), (x.shape, normal_axes(axis, len(x.shape)), keepdims))


def min(x, axis=None, keepdims=False):
    """The smallest element over `axis`; elements that tie share the gradient equally."""
    return bind(_min, (x,), (x.shape, normal_axes(axis, len(x.shape)), keepdims))


def argmax(x, axis=None):
    """The index (int64) of the first largest element; it has no derivative."""
    return bind(_argmax, (x,), (normal_axes(axis, len(x.shape)),))


def broadcast_to(x, shape):
    """x copied along new and size-1 axes to `shape`."""
    shape = tuple(shape)
    return x if x.shape == shape else bind(_broadcast, (x,), (x.shape, shape))


def logsumexp(x, axis=None, keepdims=False):
    """log Σ exp(x) over `axis`, without overflow."""
    from .elementwise import exp, log
    top = lower(x).max(axis=axis, keepdims=True)
    total = log(sum(exp(x - top), axis, keepdims=True)) + top
    if keepdims:
        return total
    axes = normal_axes(axis, len(x.shape))
    gone = range(len(x.shape)) if axes is None else axes if isinstance(axes, tuple) else (axes,)
    return reshape(total, tuple(e for i, e in enumerate(x.shape) if i not in gone))


__all__ = ["argmax", "astype", "broadcast_to", "logsumexp", "max", "mean", "min", "std", "sum", "unbroadcast", "var"]
