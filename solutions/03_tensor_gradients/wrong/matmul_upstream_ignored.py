# 03.2: the gradient that comes in is ignored
import numpy as np


def matmul_backward(gradient, x, y, unbroadcast):
    gradient = np.ones_like(gradient)
    row = x[None, :] if x.ndim == 1 else x
    column = y[:, None] if y.ndim == 1 else y
    if y.ndim == 1:
        gradient = gradient[..., None]
    if x.ndim == 1:
        gradient = gradient[..., None, :]
    of_row = unbroadcast(gradient @ column.swapaxes(-1, -2), row.shape)
    of_column = unbroadcast(row.swapaxes(-1, -2) @ gradient, column.shape)
    return of_row.reshape(x.shape), of_column.reshape(y.shape)
