"""Pooling, as torch names it. The kernels walk over the places of the window and work on strided views of the input:
nothing as large as all windows is ever made (4 to 9 times the input)."""

import math

from ...backend import is_floating, xp
from ..primitive import Primitive, bind, lower
from .arrange import pad
from .convolution import inside, padded
from .elementwise import floats
from .reduction import max, sum
from .windows import add_windows, per_axis, shifts, view, windows


def _around(padding):
    return [(0, 0), (0, 0), *((p, p) for p in padding)]


def _last(n):
    return tuple(range(-n, 0))


# ---------------------------------------------------------------- maxima

def _least(dtype):
    """What is no larger than any other number of this dtype."""
    return -xp.inf if is_floating(dtype) else xp.iinfo(dtype).min if dtype.kind in "iu" else False


def _max_definition(x, kernel, stride, padding, dilation):
    wide = pad(x, _around(padding), constant_values=_least(x.dtype) if any(padding) else 0)
    parts = windows(wide, kernel, stride, dilation)
    return max(parts, _last(len(kernel)))


def _max_forward(x, kernel, stride, padding, dilation):
    x = padded(x, padding, _least(x.dtype))
    n = len(kernel)
    counts = view(x, kernel, stride, dilation).shape[2:2 + n]
    out = None
    for _, part in shifts(x, counts, kernel, stride, dilation):
        out = part.copy() if out is None else xp.maximum(out, part, out=out)
    return out


def _max_pullback(ct, wanted, ans, x, kernel, stride, padding, dilation):
    wide, counts = padded(x, padding, _least(x.dtype)), ans.shape[2:]
    largest = [part == ans for _, part in shifts(wide, counts, kernel, stride, dilation)]
    ties = largest[0].astype(xp.int32 if len(largest) > 255 else xp.uint8)
    for mask in largest[1:]:
        ties += mask
    share = ct / ties.astype(ct.dtype)
    out = xp.zeros_like(wide)
    apart = all(s >= d * (k - 1) + 1 for s, d, k in zip(stride, dilation, kernel, strict=True))    # no two windows meet
    for mask, (_, target) in zip(largest, shifts(out, counts, kernel, stride, dilation), strict=True):
        if apart:
            xp.multiply(share, mask, out=target)
        else:
            target += share * mask
    return (out[inside(padding, x.shape[2:])],)


_max_pool = Primitive("max_pool", _max_forward, "x", "kernel stride padding dilation",
                      definition=_max_definition, pullback=_max_pullback)


# ---------------------------------------------------------------- means

def _weights(x, kernel, stride, padding, counted):
    """How many elements each mean divides by: a number, or an array where padding doesn't count."""
    if counted or not any(padding):
        return math.prod(kernel)
    ones = padded(xp.ones_like(lower(x)[:1, :1]), padding)
    return view(ones, kernel, stride, (1,) * len(kernel)).sum(axis=_last(len(kernel)))


def _avg_definition(x, kernel, stride, padding, counted):
    total = sum(windows(pad(x, _around(padding)), kernel, stride, (1,) * len(kernel)), _last(len(kernel)))
    return total / _weights(x, kernel, stride, padding, counted)


def _avg_forward(x, kernel, stride, padding, counted):
    wide, one = padded(x, padding), (1,) * len(kernel)
    out = None
    for _, part in shifts(wide, view(wide, kernel, stride, one).shape[2:2 + len(kernel)], kernel, stride, one):
        out = part.copy() if out is None else xp.add(out, part, out=out)
    out /= _weights(x, kernel, stride, padding, counted)
    return out


def _avg_pullback(ct, wanted, x, kernel, stride, padding, counted):
    share = ct / _weights(x, kernel, stride, padding, counted)
    extents = tuple(e + 2 * p for e, p in zip(x.shape[2:], padding, strict=True))
    parts = xp.broadcast_to(share[(..., *(None,) * len(kernel))], share.shape + kernel)
    return (add_windows(parts, extents, kernel, stride, (1,) * len(kernel))[inside(padding, x.shape[2:])],)


_avg_pool = Primitive("avg_pool", _avg_forward, "x", "kernel stride padding counted",
                      definition=_avg_definition, pullback=_avg_pullback)


# ---------------------------------------------------------------- what users call

def _arguments(name, n, x, kernel, stride, padding, dilation=1):
    kernel = per_axis(name, "kernel_size", kernel, n, 1)
    stride = kernel if stride is None else per_axis(name, "stride", stride, n, 1)
    padding, dilation = per_axis(name, "padding", padding, n, 0), per_axis(name, "dilation", dilation, n, 1)
    if len(x.shape) != n + 2:
        raise ValueError(f"{name}: x {x.shape} must have {n + 2} axes: (n, channels, *extents)")
    for extent, k, p, d in zip(x.shape[2:], kernel, padding, dilation, strict=True):
        if 2 * p > k or extent + 2 * p < d * (k - 1) + 1:
            raise ValueError(f"{name}: kernel {kernel} with dilation {dilation} and padding {padding} (at most half of "
                             f"it) doesn't fit into {x.shape[2:]}")
    return kernel, stride, padding, dilation


def max_pool1d(x, kernel_size, stride=None, padding=0, dilation=1):
    """As max_pool2d, over the last axis of x (n, channels, length)."""
    return bind(_max_pool, (x,), _arguments("max_pool1d", 1, x, kernel_size, stride, padding, dilation))


def max_pool2d(x, kernel_size, stride=None, padding=0, dilation=1):
    """The largest element of each window of x (n, channels, height, width); stride defaults to kernel_size, padding is
    -inf, of integers the least. Elements of a window that tie share its gradient equally (torch: the first gets
    all)."""
    return bind(_max_pool, (x,), _arguments("max_pool2d", 2, x, kernel_size, stride, padding, dilation))


def avg_pool1d(x, kernel_size, stride=None, padding=0, count_include_pad=True):
    """As avg_pool2d, over the last axis of x (n, channels, length)."""
    return bind(_avg_pool, (floats(x),), (*_arguments("avg_pool1d", 1, x, kernel_size, stride, padding)[:3],
                                          bool(count_include_pad)))


def avg_pool2d(x, kernel_size, stride=None, padding=0, count_include_pad=True):
    """The mean of each window of x (n, channels, height, width); stride defaults to kernel_size; padding counts as
    zeros, or not at all with count_include_pad=False."""
    return bind(_avg_pool, (floats(x),), (*_arguments("avg_pool2d", 2, x, kernel_size, stride, padding)[:3],
                                          bool(count_include_pad)))
