"""Convolution in one, two or three dimensions, as torch names it: x (n, channels, *extents), weight (out,
channels / groups, *kernel), no flipping of the kernel."""

import itertools
import math

from ... import backend
from ...backend import on_host, whole, xp, zeros_like
from ..primitive import Primitive, bind
from .arrange import pad
from .einsum import einsum
from .indexing import getitem
from .shape import reshape
from .windows import add_windows, fold, per_axis, view, window_counts, windows

COUNTS, KERNEL = "xyz", "uvw"       # letters for einsum


# The fused op. Its kernel copies the windows into columns (im2col) and leaves the rest to the matrix product, one per
# sample: (out, channels·kernel) @ (channels·kernel, count). That gives the output in its final layout. Measured on CPU
# for 3×3 and 5×5 kernels, it is as fast as one large product with its transposed copy, and 1.3 to 2 times faster than
# a sum of kernel-many products of shifted inputs; columns as rows take 3 times as long. Backward makes the columns
# again: kept, they would hold as many times the input's memory as the kernel has elements. On the host they are made
# for some samples at a time, so that the product finds them in a cache (measured: up to 1.8 times as fast).

AT_A_TIME = 2 ** 23     # bytes of columns and of what is made of them
SHORT = 32              # elements of a row; longer ones NumPy copies as fast as memory lets it


def _definition(x, weight, bias, stride, padding, dilation, groups):
    n, (out, inside, *kernel) = len(stride), weight.shape
    counts, places = COUNTS[:n], KERNEL[:n]
    parts = windows(pad(x, [(0, 0), (0, 0), *((p, p) for p in padding)]), tuple(kernel), stride, dilation)
    parts = reshape(parts, (x.shape[0], groups, inside, *parts.shape[2:]))
    y = einsum(f"bgi{counts}{places},goi{places}->bgo{counts}", parts,
               reshape(weight, (groups, out // groups, inside, *kernel)))
    y = reshape(y, (x.shape[0], out, *y.shape[3:]))
    return y if bias is None else y + reshape(bias, (out,) + (1,) * n)


def padded(x, padding, value=0):
    """A raw x with `padding` on both sides of each spatial axis."""
    if not any(padding):
        return x
    lead = x.ndim - len(padding)
    shape = x.shape[:lead] + tuple(e + 2 * p for e, p in zip(x.shape[lead:], padding, strict=True))
    out = zeros_like(x, shape)
    if value:
        out[...] = value
    out[inside(padding, x.shape[lead:])] = x
    return out


def inside(padding, extents):
    """The index of what is not padding."""
    return (..., *(slice(p, p + e) for p, e in zip(padding, extents, strict=True)))


def _columns(x, kernel, stride, dilation, groups):
    """(n, groups, channels/groups · kernel, count) of a padded x, a copy unless the kernel has one element.

    NumPy copies piece by piece what lies side by side, and here that is a row of an image: many short ones. So at
    stride 1 the host copies along one axis after the other, the last first: in the later copies, which are the large
    ones, all rows that a place of the kernel sees are one piece (measured: 1.2 to 1.9 times as fast).
    """
    n = len(kernel)
    counts = window_counts(x.shape[2:], kernel, stride, dilation)
    if n > 1 and max(stride) == 1 < min(kernel) and counts[-1] < SHORT and on_host(x):
        for axis in range(n - 1, -1, -1):
            d, count, behind = dilation[axis], counts[axis], (slice(None),) * (n - 1 - axis)
            x = xp.stack([x[(..., slice(i * d, i * d + count), *behind)] for i in range(kernel[axis])], 2)
    else:
        x = view(x, kernel, stride, dilation).transpose(0, 1, *range(2 + n, 2 + 2 * n), *range(2, 2 + n))
    return x.reshape(x.shape[0], groups, x.shape[1] // groups * math.prod(kernel), math.prod(counts))


def _made(x, kernel, counts, out):
    """Elements of the columns of a sample, and of what has their count: an output, or its cotangent. (A kernel of one
    element needs no columns.)"""
    return 0 if math.prod(kernel) == 1 else (x.shape[1] * math.prod(kernel) + out) * math.prod(counts)


def _by_samples(formula, made, *arrays):
    """formula(*arrays) of raw arrays whose first axis counts samples, on the host for some samples after the others;
    `made` is how many elements it makes for each. The same bits."""
    samples = len(arrays[0])
    blocks = math.ceil(samples * made * arrays[0].itemsize / AT_A_TIME)
    if blocks < 2 or not on_host(arrays[0]):
        return formula(*arrays)
    whole, step = None, math.ceil(samples / blocks)
    for start in range(0, samples, step):
        part = slice(start, start + step)
        result = formula(*(a[part] for a in arrays))
        if whole is None:
            whole = xp.empty((samples, *result.shape[1:]), result.dtype)
        whole[part] = result
    return whole


def _forward(x, weight, bias, stride, padding, dilation, groups):
    x, out, kernel = padded(x, padding), weight.shape[0], weight.shape[2:]
    counts, rows = window_counts(x.shape[2:], kernel, stride, dilation), weight.reshape(groups, out // groups, -1)
    y = _by_samples(lambda x: backend.matmul(rows, _columns(x, kernel, stride, dilation, groups)),
                    _made(x, kernel, counts, out), x).reshape(x.shape[0], out, *counts)
    if bias is None:
        return y
    bias = bias.reshape((out,) + (1,) * len(stride))
    if bias.dtype != y.dtype:
        return y + bias
    y += bias
    return y


def _back(rows, ct, channels, kernel, counts, extents, stride, dilation):
    """The cotangent of a padded x of `extents`: what each place of the kernel gives, added to where
    it was read.

    rows (groups, out/groups, in/groups · kernel), ct (n, groups, out/groups, count), channels those of x.
    At stride 1, rows of ct are laid out as far apart as those of x. What a place of the kernel gives then belongs to
    the elements of the flat x from one offset on: one long sum each, not one for every row (measured: twice as fast).
    Where each channel is by itself, a matrix product has nothing to add up, and a plain one does (measured: 2 to 3
    times as fast).

        ct  a b c . . d e f     counts (2, 3), x of extents (3, 5): two zeros between the rows
        x   · a b c . . d e f · · · · · ·      the second place of the kernel: from offset 1 on
    """
    shape = ct.shape[0], channels
    if any(s > 1 for s in stride):
        n = len(kernel)
        parts = backend.matmul(rows.swapaxes(1, 2), ct).reshape(*shape, *kernel, *counts)
        parts = parts.transpose(0, 1, *range(2 + n, 2 + 2 * n), *range(2, 2 + n))
        return add_windows(parts, extents, kernel, stride, dilation)
    wide = zeros_like(ct, (*ct.shape[:3], counts[0], *extents[1:]))
    wide[(..., *(slice(0, c) for c in counts))] = ct.reshape(*ct.shape[:3], *counts)
    steps = [math.prod(extents[i + 1:]) for i in range(len(extents))]
    used = sum((c - 1) * s for c, s in zip(counts, steps, strict=True)) + 1     # up to the last element of ct
    wide = wide.reshape(*ct.shape[:3], math.prod(wide.shape[3:]))[..., :used]
    depthwise = rows.shape[:2] == (channels, 1)
    if not depthwise:
        parts = backend.matmul(rows.swapaxes(1, 2), wide).reshape(*shape, math.prod(kernel), used)
    out = zeros_like(ct, (*shape, math.prod(extents)))
    for k, place in enumerate(itertools.product(*map(range, kernel))):
        first = sum(i * d * s for i, d, s in zip(place, dilation, steps, strict=True))
        out[..., first:first + used] += wide[:, :, 0] * rows[:, :, k] if depthwise else parts[:, :, k]
    return out.reshape(*shape, *extents)


def _pullback(ct, wanted, x, weight, stride, padding, dilation, groups):
    n, out, kernel = len(stride), weight.shape[0], weight.shape[2:]
    counts = ct.shape[2:]
    flat = ct.reshape(ct.shape[0], groups, out // groups, math.prod(counts))     # -1 fails on empty batches
    gx = gw = None
    made = _made(x, kernel, counts, out)
    if wanted[0]:
        rows = weight.reshape(groups, out // groups, -1)
        extents = tuple(e + 2 * p for e, p in zip(x.shape[2:], padding, strict=True))
        gx = _by_samples(lambda ct: _back(rows, ct, x.shape[1], kernel, counts, extents, stride, dilation), made, flat)
        gx = gx[inside(padding, x.shape[2:])]
    if wanted[1]:
        def product(ct, x):
            return backend.matmul(ct, _columns(x, kernel, stride, dilation, groups).swapaxes(2, 3))
        gw = backend.add_up(_by_samples(product, made, flat, padded(x, padding)), 0).reshape(weight.shape)
    return gx, gw, backend.add_up(ct, (0, *range(2, 2 + n))) if wanted[2] else None


_conv = Primitive("conv", _forward, "x weight bias", "stride padding dilation groups",
                  definition=_definition, pullback=_pullback)


def _conv_nd(n, x, weight, bias, stride, padding, dilation, groups):
    name = f"conv{n}d"
    stride, dilation = (per_axis(name, what, v, n, 1) for what, v in (("stride", stride), ("dilation", dilation)))
    padding, groups = per_axis(name, "padding", padding, n, 0), whole("groups", groups)
    if len(x.shape) != n + 2 or len(weight.shape) != n + 2:
        raise ValueError(f"{name}: x {x.shape} and weight {weight.shape} must both have {n + 2} axes")
    channels, (out, inner) = x.shape[1], weight.shape[:2]
    if groups < 1 or channels != inner * groups or out % groups:
        raise ValueError(f"{name}: x has {channels} channels, weight {weight.shape} takes {inner} in each of {groups} "
                         f"groups and gives {out}: channels must be {inner * groups}, and groups divide both")
    if bias is not None and bias.shape != (out,):
        raise ValueError(f"{name}: bias {bias.shape} must be ({out},)")
    for extent, p, k, d in zip(x.shape[2:], padding, weight.shape[2:], dilation, strict=True):
        if extent + 2 * p < d * (k - 1) + 1:
            raise ValueError(f"{name}: a kernel of {weight.shape[2:]} with dilation {dilation} doesn't fit into "
                             f"extents {x.shape[2:]} with padding {padding}")
    return bind(_conv, (x, weight, bias), (stride, padding, dilation, groups))


def conv1d(x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    """Convolution over the last axis: x (n, in, length), weight (out, in/groups, kernel), bias (out) or None -> (n,
    out, (length + 2·padding - dilation·(kernel - 1) - 1) // stride + 1). Raises ValueError where shapes don't fit."""
    return _conv_nd(1, x, weight, bias, stride, padding, dilation, groups)


def conv2d(x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    """Convolution over the last two axes: x (n, in, height, width), weight (out, in/groups, kh, kw), bias (out) or
    None; stride, padding and dilation are an int or one per axis. Extents as in conv1d."""
    return _conv_nd(2, x, weight, bias, stride, padding, dilation, groups)


def _conv_transpose_nd(n, x, weight, bias, stride, padding, output_padding, groups, dilation):
    name = f"conv_transpose{n}d"
    stride, dilation = (per_axis(name, what, v, n, 1) for what, v in (("stride", stride), ("dilation", dilation)))
    padding, more = (per_axis(name, what, v, n, 0) for what, v in (("padding", padding),
                                                                    ("output_padding", output_padding)))
    groups = whole("groups", groups)
    if len(x.shape) != n + 2 or len(weight.shape) != n + 2 or x.shape[1] != weight.shape[0] \
            or groups < 1 or x.shape[1] % groups:
        raise ValueError(f"{name}: x {x.shape} and weight {weight.shape} (in, out/groups, *kernel) with {groups} "
                         "groups don't fit")
    if any(m >= s for m, s in zip(more, stride, strict=True)):
        raise ValueError(f"{name}: output_padding {more} must be smaller than stride {stride}")
    channels, out, *kernel = weight.shape
    counts, places = COUNTS[:n], KERNEL[:n]
    parts = einsum(f"bgi{counts},gio{places}->bgo{counts}{places}",
                   reshape(x, (x.shape[0], groups, channels // groups, *x.shape[2:])),
                   reshape(weight, (groups, channels // groups, out, *kernel)))
    parts = reshape(parts, (x.shape[0], groups * out, *parts.shape[3:]))
    extents = tuple((e - 1) * s + d * (k - 1) + 1 + m
                    for e, s, d, k, m in zip(x.shape[2:], stride, dilation, kernel, more, strict=True))
    if any(e <= 2 * p for e, p in zip(extents, padding, strict=True)):
        raise ValueError(f"{name}: of results of extents {extents} a padding of {padding} on both sides leaves nothing")
    y = fold(parts, extents, tuple(kernel), stride, dilation)
    if any(padding):
        y = getitem(y, (..., *(slice(p, e - p) for p, e in zip(padding, extents, strict=True))))
    return y if bias is None else y + reshape(bias, (groups * out,) + (1,) * n)


def conv_transpose1d(x, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1):
    """The transpose of conv1d in x, composed: x (n, in, length), weight (in, out/groups, kernel), bias (out)."""
    return _conv_transpose_nd(1, x, weight, bias, stride, padding, output_padding, groups, dilation)


def conv_transpose2d(x, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1):
    """The transpose of conv2d in x, composed: x (n, in, height, width), weight (in, out/groups, kh, kw), bias (out)."""
    return _conv_transpose_nd(2, x, weight, bias, stride, padding, output_padding, groups, dilation)
