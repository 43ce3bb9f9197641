# 03.2: with matrices and batches it is right, with a vector it isn't
import numpy as np


def matmul_backward(gradient, x, y, unbroadcast):
    if x.ndim == 1 and y.ndim == 2:
        outer = np.outer(gradient, x)
        return y @ gradient, outer if outer.shape == y.shape else outer.T
    row = x[None, :] if x.ndim == 1 else x
    column = y[:, None] if y.ndim == 1 else y
    if y.ndim == 1:
        gradient = gradient[..., None]
    if x.ndim == 1:
        gradient = gradient[..., None, :]
    of_row = unbroadcast(gradient @ column.swapaxes(-1, -2), row.shape)
    of_column = unbroadcast(row.swapaxes(-1, -2) @ gradient, column.shape)
    return of_row.reshape(x.shape), of_column.reshape(y.shape)
