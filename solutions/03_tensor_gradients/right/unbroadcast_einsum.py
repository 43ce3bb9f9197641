# 03.1: einsum over the axes that stay
import numpy as np


def unbroadcast(gradient, shape):
    new = gradient.ndim - len(shape)
    axes = list(range(gradient.ndim))
    kept = [axis for axis in axes[new:] if shape[axis - new] != 1]
    return np.einsum(gradient, axes, kept).reshape(shape)
