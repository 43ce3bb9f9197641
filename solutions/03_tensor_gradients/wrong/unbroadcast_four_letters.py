# 03.1: operand has more dimensions than subscripts
import numpy as np


def unbroadcast(gradient, shape):
    letters = "abcd"[:gradient.ndim]
    own = letters[gradient.ndim - len(shape):]
    kept = "".join(letter for letter, extent in zip(own, shape, strict=False) if extent != 1)
    return np.einsum(f"{letters}->{kept}", gradient).reshape(shape)
