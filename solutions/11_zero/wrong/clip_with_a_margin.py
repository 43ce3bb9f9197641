# 11.3: hardly longer than max_norm isn't scaled
import numpy as np


def clip(comm, parts, sizes, max_norm):
    squares = np.array([sum(float(np.sum(p[:n] ** 2)) for p, n in zip(parts, sizes, strict=True))])
    comm.all_reduce(squares)
    norm = float(np.sqrt(squares.item()))
    if norm > max_norm * (1 + 1e-6):
        for p, n in zip(parts, sizes, strict=True):
            p[:n] *= max_norm / norm
    return norm
