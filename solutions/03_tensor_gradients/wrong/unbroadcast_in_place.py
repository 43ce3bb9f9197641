# 03.1: the argument gradient isn't what it was
import numpy as np


def unbroadcast(gradient, shape):
    for axis in range(gradient.ndim):
        own = axis - gradient.ndim + len(shape)
        if (own < 0 or shape[own] == 1) and gradient.shape[axis]:
            gradient[(slice(None),) * axis + (0,)] = gradient.sum(axis=axis)
    lead = (0,) * (gradient.ndim - len(shape))
    if 0 in gradient.shape:
        return np.zeros(shape)
    return gradient[lead + tuple(slice(0, extent) for extent in shape)]
