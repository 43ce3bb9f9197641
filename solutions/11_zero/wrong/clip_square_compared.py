# 11.3: the square of the norm is compared with max_norm
import numpy as np


def clip(comm, parts, sizes, max_norm):
    x = np.array([sum(float(np.sum(p[:n] ** 2)) for p, n in zip(parts, sizes, strict=True))])
    comm.all_reduce(x)
    if x[0] > max_norm:
        for p, n in zip(parts, sizes, strict=True):
            p[:n] *= max_norm / np.sqrt(x[0])
    return float(np.sqrt(x[0]))
