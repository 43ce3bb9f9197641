# 02.2: by columns f is called once per input, 6 times here
import numpy as np


def jvp(f, x, v, Dual):
    outputs = f([Dual(value, tangent) for value, tangent in zip(x, v, strict=True)])
    outputs = [y if isinstance(y, Dual) else Dual(y, 0.0) for y in outputs]
    return np.array([y.value for y in outputs]), np.array([y.tangent for y in outputs])


def jacobian_by_columns(f, x, Dual):
    m = len(jvp(f, x, x, Dual)[0])
    return np.array([[jvp(f, x, e, Dual)[1][i] for e in np.eye(len(x))] for i in range(m)])


def jacobian_by_rows(vjp, m):
    return np.stack([vjp(u) for u in np.eye(m)])
