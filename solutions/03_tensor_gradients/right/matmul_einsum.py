# 03.2: einsum, its letters put together from the numbers of axes
import numpy as np


def matmul_backward(gradient, x, y, unbroadcast):
    a = "k" if x.ndim == 1 else "...nk"
    b = "k" if y.ndim == 1 else "...km"
    out = "..." + ("n" if x.ndim > 1 else "") + ("m" if y.ndim > 1 else "")
    full_x = "..." + a.removeprefix("...")
    full_y = "..." + b.removeprefix("...")
    of_x = np.einsum(f"{out},{b}->{full_x}", gradient, y)
    of_y = np.einsum(f"{a},{out}->{full_y}", x, gradient)
    return unbroadcast(of_x, x.shape), unbroadcast(of_y, y.shape)
