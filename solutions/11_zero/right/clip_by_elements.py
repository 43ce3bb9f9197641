# 11.3: element by element, a message of a single number
import math

import numpy as np


def clip(comm, parts, sizes, max_norm):
    total = np.array(math.fsum(float(v) ** 2 for p, n in zip(parts, sizes, strict=True) for v in p[:n]))
    comm.all_reduce(total)
    norm = math.sqrt(total)
    if norm > max_norm:
        for p, n in zip(parts, sizes, strict=True):
            np.multiply(p[:n], max_norm / norm, out=p[:n])
    return norm
