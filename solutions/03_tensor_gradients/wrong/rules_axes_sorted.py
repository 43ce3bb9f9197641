# 03.3: np.expand_dims takes the whole tuple
import numpy as np


def transpose_backward(gradient, axes):
    if axes is None:
        return gradient.transpose()
    back = [0] * gradient.ndim
    for i, axis in enumerate(axes):
        back[axis] = i
    return gradient.transpose(back)


def sum_backward(gradient, shape, axis, keepdims):
    if axis is not None and not keepdims:
        for each in sorted(axis if isinstance(axis, tuple) else (axis,)):
            gradient = np.expand_dims(gradient, each)
    return np.broadcast_to(gradient, shape).copy()


def max_backward(gradient, x, axis, keepdims):
    mask = x == x.max(axis=axis, keepdims=True)
    parts = sum_backward(gradient, x.shape, axis, keepdims)
    return mask * parts / mask.sum(axis=axis, keepdims=True).astype(gradient.dtype)


def getitem_backward(gradient, shape, index):
    out = np.zeros(shape, gradient.dtype)
    np.add.at(out, index, gradient)
    return out


RULES = {"transpose": transpose_backward, "sum": sum_backward, "max": max_backward, "getitem": getitem_backward}
