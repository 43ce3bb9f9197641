# 02.2: the direction isn't set back
import numpy as np


def jvp(f, x, v, Dual):
    outputs = f([Dual(value, tangent) for value, tangent in zip(x, v, strict=True)])
    outputs = [y if isinstance(y, Dual) else Dual(y, 0.0) for y in outputs]
    return np.array([y.value for y in outputs]), np.array([y.tangent for y in outputs])


def jacobian_by_columns(f, x, Dual):
    columns, e = [], np.zeros(len(x))
    for j in range(len(x)):
        e[j] = 1.0
        columns.append(jvp(f, x, e, Dual)[1])
    return np.stack(columns, axis=1)


def jacobian_by_rows(vjp, m):
    return np.stack([vjp(u) for u in np.eye(m)])
