# 03.3: argmax knows only one
import numpy as np


def transpose_backward(gradient, axes):
    if axes is None:
        return gradient.transpose()
    return gradient.transpose(np.argsort([axis % gradient.ndim for axis in axes]))


def sum_backward(gradient, shape, axis, keepdims):
    if axis is not None and not keepdims:
        gradient = np.expand_dims(gradient, axis)
    return np.broadcast_to(gradient, shape).copy()


def max_backward(gradient, x, axis, keepdims):
    axes = range(x.ndim) if axis is None else np.atleast_1d(axis) % x.ndim
    rest = [i for i in range(x.ndim) if i not in axes]
    lines = x.transpose(rest + sorted(axes)).reshape(*(x.shape[i] for i in rest), -1)
    share = np.zeros(lines.shape, gradient.dtype)
    np.put_along_axis(share, lines.argmax(-1)[..., None], 1, -1)
    order = rest + sorted(axes)
    share = share.reshape([x.shape[i] for i in order]).transpose(np.argsort(order))
    return sum_backward(gradient, x.shape, axis, keepdims) * share


def getitem_backward(gradient, shape, index):
    out = np.zeros(shape, gradient.dtype)
    np.add.at(out, index, gradient)
    return out


RULES = {"transpose": transpose_backward, "sum": sum_backward, "max": max_backward, "getitem": getitem_backward}
