# 03.3: x.max() without an axis is the largest of all
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
    winners = x == x.max()
    share = winners / winners.sum(axis=axis, keepdims=True, dtype=gradient.dtype)
    return sum_backward(gradient, x.shape, axis, keepdims) * share


def getitem_backward(gradient, shape, index):
    out = np.zeros(shape, gradient.dtype)
    np.add.at(out, index, gradient)
    return out


RULES = {"transpose": transpose_backward, "sum": sum_backward, "max": max_backward, "getitem": getitem_backward}
