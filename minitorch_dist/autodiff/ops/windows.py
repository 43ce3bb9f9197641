"""Windows: the strided view under convolution and pooling, and its transpose.

    x:       a b c d e            kernel 3, stride 2
    windows: a b c                windows (…, L) -> (…, count, kernel)
             c d e
    fold:    adds each window's cotangent to where it was read: c gets two contributions

Both are linear, and each is the other's transpose, so whatever is built from
them has all derivatives to any order.
"""

import itertools

from ...backend import in_float32, is_half, is_whole, module_of, wholes, zeros_like
from ..primitive import LinearOp, Primitive, bind

windowed = LinearOp("windows", lambda t, r: windows(t, *r[1:]), lambda c, r: fold(c, *r))
folded = LinearOp("fold", lambda t, r: fold(t, *r), lambda c, r: windows(c, *r[1:]), fresh=False)


def window_counts(extents, kernel, stride, dilation):
    """How many windows there are along each axis."""
    return tuple((e - d * (k - 1) - 1) // s + 1 for e, k, s, d in zip(extents, kernel, stride, dilation, strict=True))


def view(x, kernel, stride, dilation):
    """The windows of a raw array, without a copy: (…, *extents) -> (…, *counts, *kernel)."""
    n = len(kernel)
    steps = x.strides[x.ndim - n:]
    return module_of(x).lib.stride_tricks.as_strided(
        x, x.shape[:x.ndim - n] + window_counts(x.shape[x.ndim - n:], kernel, stride, dilation) + kernel,
        x.strides[:x.ndim - n] + tuple(a * s for a, s in zip(steps, stride, strict=True))
        + tuple(a * d for a, d in zip(steps, dilation, strict=True)))


def shifts(x, counts, kernel, stride, dilation):
    """For each place in the kernel: (place, the view of x that the windows hold there)."""
    for place in itertools.product(*map(range, kernel)):
        yield place, x[(..., *(slice(i * d, i * d + s * (c - 1) + 1, s)
                               for i, d, s, c in zip(place, dilation, stride, counts, strict=True)))]


def add_windows(c, extents, kernel, stride, dilation):
    """fold on a raw array."""
    if c.itemsize == 2 and is_half(c):
        return in_float32(add_windows, c, extents, kernel, stride, dilation)
    n = len(kernel)
    counts = c.shape[c.ndim - 2 * n:c.ndim - n]
    out = zeros_like(c, c.shape[:c.ndim - 2 * n] + extents)
    for place, part in shifts(out, counts, kernel, stride, dilation):
        part += c[(..., *place)]
    return out


_windows = Primitive("windows", lambda x, extents, kernel, stride, dilation: view(x, kernel, stride, dilation),
                     params="extents kernel stride dilation", x=(windowed, "extents kernel stride dilation"))
_fold = Primitive("fold", add_windows, params="extents kernel stride dilation",
                  x=(folded, "extents kernel stride dilation"))


def windows(x, kernel, stride, dilation):
    """All windows over the last len(kernel) axes: (…, *extents) -> (…, *counts, *kernel). All arguments tuples."""
    extents = x.shape[len(x.shape) - len(kernel):]
    if any(count < 1 for count in window_counts(extents, kernel, stride, dilation)):
        raise ValueError(f"a kernel of {kernel} with dilation {dilation} doesn't fit into extents {extents}")
    return bind(_windows, (x,), (extents, kernel, stride, dilation))


def fold(c, extents, kernel, stride, dilation):
    """The transpose of windows: (…, *counts, *kernel) -> (…, *extents), overlaps added up."""
    return bind(_fold, (c,), (tuple(extents), kernel, stride, dilation))


def per_axis(name, what, value, n, least):
    """A whole number, or one per spatial axis, as a tuple of ints; each at least `least`."""
    try:
        values = wholes("value", value) * (n if is_whole(value) else 1)
    except TypeError:
        values = ()
    if len(values) != n or min(values) < least:
        raise ValueError(f"{name}: {what} {value!r} must be an int or {n} ints, at least {least}")
    return values
