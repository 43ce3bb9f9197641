# 11.3: each unit is clipped by itself
import numpy as np


def clip(comm, parts, sizes, max_norm):
    x = np.array([float(np.sum(p[:n] ** 2)) for p, n in zip(parts, sizes, strict=True)])
    comm.all_reduce(x)
    norms = np.sqrt(x)
    for p, n, m in zip(parts, sizes, norms):
        if m > max_norm:
            p[:n] *= max_norm / m
    return float(np.sqrt(x.sum()))
