# 03.2: the gradient of y comes out transposed
import numpy as np


def matmul_backward(gradient, x, y, unbroadcast):
    row = x[None, :] if x.ndim == 1 else x
    column = y[:, None] if y.ndim == 1 else y
    gradient = gradient[..., None] if y.ndim == 1 else gradient
    gradient = gradient[..., None, :] if x.ndim == 1 else gradient
    of_x = gradient @ np.swapaxes(column, -1, -2)
    of_y = np.swapaxes(gradient, -1, -2) @ row
    return unbroadcast(of_x, row.shape).reshape(x.shape), unbroadcast(of_y, column.shape).reshape(y.shape)
