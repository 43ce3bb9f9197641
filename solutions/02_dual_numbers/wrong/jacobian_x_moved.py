# 02.2: the array x has other numbers after jvp
import numpy as np


def jvp(f, x, v, Dual):
    outputs = f([Dual(value, tangent) for value, tangent in zip(x, v, strict=True)])
    outputs = [y if isinstance(y, Dual) else Dual(y, 0.0) for y in outputs]
    x += v
    return np.array([y.value for y in outputs]), np.array([y.tangent for y in outputs])


def jacobian_by_columns(f, x, Dual):
    return np.stack([jvp(f, x, e, Dual)[1] for e in np.eye(len(x))], axis=1)


def jacobian_by_rows(vjp, m):
    return np.stack([vjp(u) for u in np.eye(m)])
