# 03.2: float64 comes out where float32 went in
import numpy as np


def matmul_backward(gradient, x, y, unbroadcast):
    row = x[None, :] if x.ndim == 1 else x
    column = y[:, None] if y.ndim == 1 else y
    if y.ndim == 1:
        gradient = gradient[..., None]
    if x.ndim == 1:
        gradient = gradient[..., None, :]
    of_row = unbroadcast(gradient @ column.swapaxes(-1, -2), row.shape)
    of_column = unbroadcast(row.swapaxes(-1, -2) @ gradient, column.shape)
    if y.ndim > 1:
        return of_row.reshape(x.shape), of_column.reshape(y.shape)
    of_y = np.zeros(y.shape)
    of_y += of_column[:, 0]
    return of_row.reshape(x.shape), of_y
