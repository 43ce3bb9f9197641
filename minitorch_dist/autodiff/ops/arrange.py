"""Moving elements around, composed of reshape, transpose, concatenate, getitem and their transposes."""

from ...backend import module_of, whole, wholes, xp
from ..primitive import lower
from .indexing import getitem, scatter_add
from .reduction import broadcast_to
from .shape import as_arrays, concatenate, reshape, transpose


def _axes(name, axis, ndim):
    """A whole number or several as non-negative ints."""
    axes = wholes("axis", axis)
    if not {*axes} <= {*range(-ndim, ndim)}:
        raise ValueError(f"{name}: axis {axis} is out of range for {ndim} axes")
    axes = tuple(a % ndim for a in axes)
    if len({*axes}) != len(axes):
        raise ValueError(f"{name}: axis {axis} names an axis twice")
    return axes


def ravel(x):
    """x with one axis, in row-major order."""
    return reshape(x, (x.size,))


def flatten(x, start_dim=0, end_dim=-1):
    """x with the axes start_dim to end_dim (included) made one, as in torch."""
    if not x.shape:
        return reshape(x, (1,))
    first, last = (_axes("flatten", d, len(x.shape))[0] for d in (start_dim, end_dim))
    if first > last:
        raise ValueError(f"flatten: start_dim {start_dim} comes after end_dim {end_dim} in shape {x.shape}")
    count = 1
    for extent in x.shape[first:last + 1]:
        count *= extent
    return reshape(x, (*x.shape[:first], count, *x.shape[last + 1:]))


def expand_dims(x, axis):
    """x with new axes of extent 1 where the result has `axis` (an int or several)."""
    n = len(x.shape) + len(wholes("axis", axis))
    new, old = _axes("expand_dims", axis, n), iter(x.shape)
    return reshape(x, tuple(1 if i in new else next(old) for i in range(n)))


def squeeze(x, axis=None):
    """x without its axes of extent 1, or without `axis`, whose extents must be 1."""
    gone = tuple(i for i, e in enumerate(x.shape) if e == 1) if axis is None else _axes("squeeze", axis, len(x.shape))
    if wrong := [i for i in gone if x.shape[i] != 1]:
        raise ValueError(f"squeeze: axis {wrong[0]} of shape {x.shape} has more or less than one element")
    return reshape(x, tuple(e for i, e in enumerate(x.shape) if i not in gone))


def moveaxis(x, source, destination):
    """x with the axes `source` (an int or several) at `destination`, the others in their old order."""
    n = len(x.shape)
    source, destination = _axes("moveaxis", source, n), _axes("moveaxis", destination, n)
    if len(source) != len(destination):
        raise ValueError(f"moveaxis: {len(source)} axes to {len(destination)} places")
    rest, taken = iter(i for i in range(n) if i not in source), dict(zip(destination, source, strict=True))
    return transpose(x, tuple(taken[i] if i in taken else next(rest) for i in range(n)))


def swapaxes(x, axis1, axis2):
    """x with two axes exchanged."""
    a, b = (_axes("swapaxes", axis, len(x.shape))[0] for axis in (axis1, axis2))
    perm = list(range(len(x.shape)))
    perm[a], perm[b] = b, a
    return transpose(x, tuple(perm))


def flip(x, axis=None):
    """x backwards along `axis` (None: all; an int or several)."""
    n = len(x.shape)
    axes = range(n) if axis is None else _axes("flip", axis, n)
    return getitem(x, tuple(slice(None, None, -1) if i in axes else slice(None) for i in range(n)))


def stack(arrays, axis=0):
    """Arrays of one shape along a new axis."""
    arrays = as_arrays("stack", arrays)
    if len({a.shape for a in arrays}) != 1:
        raise ValueError(f"stack: needs arrays of one shape, got {[a.shape for a in arrays]}")
    return concatenate([expand_dims(a, axis) for a in arrays], _axes("stack", axis, len(arrays[0].shape) + 1)[0])


def pad(x, pad_width, mode="constant", constant_values=0):
    """x between constants: pad_width is an int, (before, after), or one such pair per axis, as in NumPy."""
    if mode != "constant":
        raise ValueError(f"pad: mode {mode!r}; only 'constant' exists")
    n = len(x.shape)
    given = xp.asarray(pad_width)
    if given.dtype.kind not in "iu":
        raise TypeError(f"pad: widths {pad_width} must be whole numbers")
    widths = xp.broadcast_to(given, (n, 2)).tolist() if n else []
    if any(w < 0 for pair in widths for w in pair):
        raise ValueError(f"pad: widths {pad_width} must not be negative; cut with x[…]")
    shape = tuple(before + extent + after for extent, (before, after) in zip(x.shape, widths, strict=True))
    inside = tuple(slice(before, before + extent) for extent, (before, _) in zip(x.shape, widths, strict=True))
    out = scatter_add(x, inside, shape)
    if xp.ndim(lower(constant_values)):
        raise ValueError(f"pad: constant_values={constant_values!r}: one number for all sides; to pad with several, "
                         "pad several times")
    if constant_values:
        frame = module_of(lower(x)).full(shape, constant_values, x.dtype)
        frame[inside] = -0.0        # + 0 would make 0 of -0
        out = out + frame
    return out


def tile(x, reps):
    """x repeated reps[i] times along axis i as a whole: 1 2 -> 1 2 1 2."""
    reps = wholes("reps", reps)
    n = max(len(reps), len(x.shape))
    reps, shape = (1,) * (n - len(reps)) + reps, (1,) * (n - len(x.shape)) + x.shape
    copies = broadcast_to(reshape(x, tuple(e for extent in shape for e in (1, extent))),
                          tuple(e for pair in zip(reps, shape, strict=True) for e in pair))
    return reshape(copies, tuple(r * e for r, e in zip(reps, shape, strict=True)))


def repeat(x, repeats, axis=None):
    """Each element of x repeated `repeats` (an int) times along `axis` (None: of the flattened x): 1 2 -> 1 1 2 2."""
    if axis is None:
        x, axis = ravel(x), 0
    repeats, (axis,) = whole("repeats", repeats), _axes("repeat", axis, len(x.shape))
    left, right = x.shape[:axis + 1], x.shape[axis + 1:]
    copies = broadcast_to(reshape(x, (*left, 1, *right)), (*left, repeats, *right))
    return reshape(copies, (*left[:-1], left[-1] * repeats, *right))
