"""Reductions, and broadcasting, which is a sum's transpose."""

from ...backend import add_up, adds_in_float32, in_float32, is_short, is_whole, running_sum, wholes, xp, zeros_like
from ..dispatch import as_array, with_params
from ..primitive import TRACED, LinearOp, Primitive, bind, lower, state
from .elementwise import astype, exp, isfinite, log, sqrt, where
from .indexing import getitem
from .shape import concatenate, inverse, reshape, transpose

# ---------------------------------------------------------------- linear maps

summed = LinearOp("sum", lambda t, r: sum(t, r[1], r[2]), lambda c, r: spread(c, *r))
broadcasted = LinearOp("broadcast", lambda t, r: at_shape(t, r[1]), lambda c, r: unbroadcast(c, r[0]), fresh=False)
cumulated = LinearOp("cumsum", lambda t, r: _cumulate(t, *r), lambda c, r: _cumulate(c, r[0], not r[1]))
weighted = LinearOp("weighted sum", lambda t, r: sum(t * r[0], r[2], r[3]), lambda c, r: spread(c, *r[1:]) * r[0])


def kept(shape, axes):
    """`shape` with extent 1 at `axes`: what keepdims=True leaves."""
    if axes is None:
        return (1,) * len(shape)
    axes = axes if isinstance(axes, tuple) else (axes,)
    return tuple(1 if i in axes else extent for i, extent in enumerate(shape))


def spread(c, shape, axes, keepdims=False):
    """Copy a reduction's cotangent to all elements that were summed: the transpose of sum. A new array where each sum
    was of one element, too: it may become a gradient."""
    if axes is not None and not keepdims:
        c = reshape(c, kept(shape, axes))
    if c.shape == shape and c.__class__ not in TRACED:
        return c.copy()
    return at_shape(c, shape)


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
    out = xp.empty(new, x.dtype) if isinstance(x, xp.generic) else xp.empty(new, x.dtype, like=x)
    out[...] = x
    return out


def _tie_weights(ans, x, axes):
    """Of every maximum that several elements share, each gets an equal part."""
    x, ans = lower(x), lower(ans)
    # (In 16 bits, ties couldn't be counted.)
    winners = (x == ans.reshape(kept(x.shape, axes))).astype(xp.float32 if x.dtype.itemsize == 2 else x.dtype)
    return winners / winners.sum(axis=axes, keepdims=True)


_sum = Primitive("sum", lambda x, shape, axes, keepdims: add_up(x, axes, keepdims), params="shape axes keepdims",
                 x=(summed, "shape axes keepdims"))
_broadcast = Primitive("broadcast_to", _filled, params="old new", x=(broadcasted, "old new"))
_summing, _broadcasting = with_params(_sum), with_params(_broadcast)


def _extremum(name, method):
    return Primitive(
        name, lambda x, shape, axes, keepdims: getattr(x, method)(axis=axes, keepdims=keepdims),
        params="shape axes keepdims",
        x=(weighted, lambda ans, x, shape, axes, keepdims: (_tie_weights(ans, x, axes), shape, axes, keepdims)))


_max = _extremum("max", "max")
_min = _extremum("min", "min")
_argmax = Primitive("argmax", lambda x, axis, keepdims: x.argmax(axis=axis, keepdims=keepdims), params="axis keepdims")
_argmin = Primitive("argmin", lambda x, axis, keepdims: x.argmin(axis=axis, keepdims=keepdims), params="axis keepdims")
_any = Primitive("any", lambda x, axes, keepdims: x.any(axis=axes, keepdims=keepdims), params="axes keepdims")
_all = Primitive("all", lambda x, axes, keepdims: x.all(axis=axes, keepdims=keepdims), params="axes keepdims")


def _cumsum_forward(x, axis, backwards):
    if x.itemsize == 2 and adds_in_float32(x):
        return in_float32(_cumsum_forward, x, axis, backwards)
    return running_sum(x, axis, backwards)


_cumsum = Primitive("cumsum", _cumsum_forward, params="axis backwards", x=(cumulated, "axis backwards"))


def _cumulate(x, axis, backwards):
    return bind(_cumsum, (x,), (axis, backwards))


# ---------------------------------------------------------------- prod: right with zeros, at any order

def _lines_first(x, axes):
    """x with the reduced axes flattened into the first one."""
    n = len(x.shape)
    gone = tuple(range(n)) if axes is None else axes if isinstance(axes, tuple) else (axes,)
    rest = tuple(i for i in range(n) if i not in gone)
    return reshape(transpose(x, gone + rest) if n else x, (count(x.shape, axes), *(x.shape[i] for i in rest)))


def _prod_definition(x, axes, keepdims):
    # Halving: multiplication has no trouble with zeros, and each element meets only log2 n others.
    lines = _lines_first(x, axes)
    while (n := lines.shape[0]) > 1:
        pairs = getitem(lines, slice(0, n - 1, 2)) * getitem(lines, slice(1, n, 2))
        lines = concatenate([pairs, getitem(lines, slice(n - 1, n))]) if n % 2 else pairs
    out = sum(lines, 0) if lines.shape[0] else sum(lines, 0) + 1
    return reshape(out, kept(x.shape, axes)) if keepdims else out


def _prod_pullback(ct, wanted, x, axes):
    # Of each element: the product of those before it times the product of those after it; nothing is divided.
    lines = _lines_first(x, axes)
    before, after = xp.ones_like(lines), xp.ones_like(lines)
    xp.cumprod(lines[:-1], 0, out=before[1:])
    xp.cumprod(lines[:0:-1], 0, out=after[-2::-1])
    others = before * after * ct.reshape(lines.shape[1:])
    n = len(x.shape)
    gone = tuple(range(n)) if axes is None else axes if isinstance(axes, tuple) else (axes,)
    perm = gone + tuple(i for i in range(n) if i not in gone)
    return (others.reshape(tuple(x.shape[i] for i in perm)).transpose(inverse(perm)),)


_prod = Primitive("prod", lambda x, axes, keepdims: x.prod(axis=axes, keepdims=keepdims), params="axes keepdims",
                  wide=True, definition=_prod_definition, pullback=_prod_pullback)


def normal_axes(axis, ndim):
    """An axis argument as None, one non-negative int (NumPy is faster so) or a sorted tuple of several."""
    if axis is None or (axis.__class__ is int and 0 <= axis < ndim):
        return axis
    axes = sorted(a + ndim if a < 0 else a for a in wholes("axis", axis))
    if ndim == 0 and axes in ([0], [-1]) and is_whole(axis):        # as in NumPy
        return None
    if axes and not 0 <= axes[0] <= axes[-1] < ndim:
        raise ValueError(f"axis {axis} is out of range for {ndim} axes")
    if len({*axes}) != len(axes):
        raise ValueError(f"axis {axis} names an axis twice")
    return axes[0] if len(axes) == 1 else tuple(axes)


# ---------------------------------------------------------------- what users call

def sum(x, axis=None, keepdims=False):
    """The sum over `axis` (None: all; an int; a tuple), of x's dtype; of integers and bools in 64 bits."""
    try:
        shape = x.shape
    except AttributeError:
        return sum(as_array("sum", x), axis, keepdims)
    return _summing(x, (shape, normal_axes(axis, len(shape)), keepdims))


def count(shape, axes):
    """How many elements a reduction of `shape` over `axes` adds up."""
    n = 1
    for i, extent in enumerate(shape):
        if axes is None or i == axes or (isinstance(axes, tuple) and i in axes):
            n *= extent
    return n


def mean(x, axis=None, keepdims=False):
    """The mean over `axis`."""
    if is_short(x.dtype) and state.autocast is None:    # how many they are may be beyond float16's range
        return astype(mean(astype(x, xp.float32), axis, keepdims), x.dtype)
    axes = normal_axes(axis, len(x.shape))
    return sum(x, axes, keepdims) / count(x.shape, axes)


def var(x, axis=None, keepdims=False, correction=0):
    """The variance over `axis`: mean squared distance from the mean, divided by count - correction (NumPy: 0), which is
    at least 0."""
    if is_short(x.dtype) and state.autocast is None:
        return astype(var(astype(x, xp.float32), axis, keepdims, correction), x.dtype)
    axes = normal_axes(axis, len(x.shape))
    centred, n = x - mean(x, axes, keepdims=True), count(x.shape, axes)
    return sum(centred * centred, axes, keepdims) / (n - correction if n > correction else 0)


def std(x, axis=None, keepdims=False, correction=0):
    """The square root of var; its gradient is infinite where all elements are equal."""
    if is_short(x.dtype) and state.autocast is None:    # whose square may be beyond float16's range
        return astype(std(astype(x, xp.float32), axis, keepdims, correction), x.dtype)
    return sqrt(var(x, axis, keepdims, correction))


def max(x, axis=None, keepdims=False):
    """The largest element over `axis`; elements that tie share the gradient equally."""
    return bind(_max, (x,), (x.shape, normal_axes(axis, len(x.shape)), keepdims))


def min(x, axis=None, keepdims=False):
    """The smallest element over `axis`; elements that tie share the gradient equally."""
    return bind(_min, (x,), (x.shape, normal_axes(axis, len(x.shape)), keepdims))


def _axis_or_all(name, axis, ndim):
    found = normal_axes(axis, ndim)
    if found.__class__ is tuple:
        raise ValueError(f"{name}: axis {axis}: an index is of one axis, or with None of the flattened x: reshape "
                         "these axes to one")
    return found


def argmax(x, axis=None, keepdims=False):
    """The index (int64) of the first largest element along one axis (None: in the flattened x); no derivative."""
    return bind(_argmax, (x,), (_axis_or_all("argmax", axis, len(x.shape)), keepdims))


def argmin(x, axis=None, keepdims=False):
    """The index (int64) of the first smallest element along one axis (None: in the flattened x); no derivative."""
    return bind(_argmin, (x,), (_axis_or_all("argmin", axis, len(x.shape)), keepdims))


def any(x, axis=None, keepdims=False):
    """Whether any element over `axis` is true; no derivative."""
    return bind(_any, (x,), (normal_axes(axis, len(x.shape)), keepdims))


def all(x, axis=None, keepdims=False):
    """Whether all elements over `axis` are true; no derivative."""
    return bind(_all, (x,), (normal_axes(axis, len(x.shape)), keepdims))


def prod(x, axis=None, keepdims=False):
    """The product over `axis`; its derivatives are right where elements are 0."""
    return bind(_prod, (x,), (normal_axes(axis, len(x.shape)), keepdims))


def cumsum(x, axis=None):
    """The running sum along `axis` (None: of the flattened x), of x's dtype; of integers and bools in 64 bits."""
    if axis is None or not x.shape:
        x, axis = reshape(x, (x.size,)), 0
    axis = normal_axes(axis, len(x.shape))
    return _cumulate(x, axis, False)


def broadcast_to(x, shape):
    """x copied along new and size-1 axes to `shape`; a new array in any case."""
    x, shape = x if hasattr(x, "shape") else as_array("broadcast_to", x), wholes("shape", shape)
    if len(shape) < len(x.shape):       # which NumPy's assignment would take
        raise ValueError(f"broadcast_to: shape {shape} has fewer axes than x of shape {x.shape}; reshape x before")
    return _broadcasting(x, (x.shape, shape))


def at_shape(x, shape):
    """The same as rules call it, of a tuple of ints, or x itself."""
    return x if x.shape == shape else _broadcasting(x, (x.shape, shape))


def largest(x, axis):
    """The largest elements of a raw x over `axis`, which stays with extent 1; of nothing 0."""
    axes = normal_axes(axis, len(x.shape))
    return x.max(axis=axes, keepdims=True) if count(x.shape, axes) else zeros_like(x, kept(x.shape, axes))


def logsumexp(x, axis=None, keepdims=False):
    """log Σ exp(x) over `axis`, without overflow; of nothing, and where all are -inf, -inf."""
    axes = normal_axes(axis, len(x.shape))
    top = largest(lower(x), axes)
    top = where(isfinite(top), top, 0.0)        # inf - inf would be NaN
    total = log(sum(exp(x - top), axes, keepdims=True)) + top
    if keepdims:
        return total
    gone = range(len(x.shape)) if axes is None else axes if isinstance(axes, tuple) else (axes,)
    return reshape(total, tuple(e for i, e in enumerate(x.shape) if i not in gone))
