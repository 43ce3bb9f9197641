# 02.2: jvp returns (y, J·v), in this order
import numpy as np


def jvp(f, x, v, Dual):
    outputs = f([Dual(value, tangent) for value, tangent in zip(x, v, strict=True)])
    return (np.array([y.tangent if isinstance(y, Dual) else 0.0 for y in outputs]),
            np.array([y.value if isinstance(y, Dual) else y for y in outputs]))


def jacobian_by_columns(f, x, Dual):
    return np.stack([jvp(f, x, e, Dual)[1] for e in np.eye(len(x))], axis=1)


def jacobian_by_rows(vjp, m):
    return np.stack([vjp(u) for u in np.eye(m)])
