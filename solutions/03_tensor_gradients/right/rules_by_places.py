# 03.3: every element's place is counted with bincount
import numpy as np


def back(gradient, places, shape):
    out = np.bincount(places.ravel(), np.asarray(gradient, float).ravel(), int(np.prod(shape)))
    return out.reshape(shape).astype(gradient.dtype)


def numbered(shape):
    return np.arange(int(np.prod(shape))).reshape(shape)


def transpose_backward(gradient, axes):
    if axes is None:
        return gradient.T
    shape = dict(zip((axis % gradient.ndim for axis in axes), gradient.shape, strict=True))
    out = np.empty([shape[i] for i in range(gradient.ndim)], gradient.dtype)
    out.transpose(axes)[...] = gradient
    return out


def sum_backward(gradient, shape, axis, keepdims):
    like = np.zeros(shape, gradient.dtype)
    return like + gradient.reshape(like.sum(axis=axis, keepdims=True).shape)


def max_backward(gradient, x, axis, keepdims):
    top = x.max(axis=axis, keepdims=True)
    is_top = (x == top).astype(gradient.dtype)
    return is_top * (gradient.reshape(top.shape) / is_top.sum(axis, keepdims=True))


def getitem_backward(gradient, shape, index):
    return back(gradient, numbered(shape)[index], shape)


RULES = {"transpose": transpose_backward, "sum": sum_backward, "max": max_backward, "getitem": getitem_backward}
