# 02.2: the derivatives come from finite differences
import numpy as np


def jvp(f, x, v, Dual):
    h = 1e-6
    ahead, behind = (np.array(f(list(x + s * h * v))) for s in (1, -1))
    return np.array(f(list(x))), (ahead - behind) / (2 * h)


def jacobian_by_columns(f, x, Dual):
    return np.stack([jvp(f, x, e, Dual)[1] for e in np.eye(len(x))], axis=1)


def jacobian_by_rows(vjp, m):
    return np.stack([vjp(u) for u in np.eye(m)])
