# 03.2: a vector is made a matrix, and the function calls itself
import numpy as np


def matmul_backward(gradient, x, y, unbroadcast):
    if x.ndim == 1:
        of_x, of_y = matmul_backward(np.expand_dims(gradient, -2 if y.ndim > 1 else -1), x[None], y, unbroadcast)
        return of_x[0], of_y
    if y.ndim == 1:
        of_x, of_y = matmul_backward(np.expand_dims(gradient, -1), x, y[:, None], unbroadcast)
        return of_x, of_y[:, 0]
    of_x = np.matmul(gradient, np.moveaxis(y, -1, -2))
    of_y = np.matmul(np.moveaxis(x, -1, -2), gradient)
    return [unbroadcast(of_x, x.shape), unbroadcast(of_y, y.shape)]
