# 11.3: each rank's factor is of its own parts
import numpy as np


def clip(comm, parts, sizes, max_norm):
    loc = sum(float(np.sum(p[:n] ** 2)) for p, n in zip(parts, sizes, strict=True))
    x = np.array([loc])
    comm.all_reduce(x)
    norm = float(np.sqrt(x[0]))
    if norm > max_norm:
        for p, n in zip(parts, sizes, strict=True):
            if loc:
                p[:n] *= max_norm / loc ** .5
    return norm
