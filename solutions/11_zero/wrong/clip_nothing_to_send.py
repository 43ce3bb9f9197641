# 11.3: the ranks call different collectives
import numpy as np


def clip(comm, parts, sizes, max_norm):
    if not any(sizes):
        return 0.0
    squares = np.array([sum(float(np.sum(p[:n] ** 2)) for p, n in zip(parts, sizes))])
    comm.all_reduce(squares)
    norm = float(np.sqrt(squares[0]))
    if norm > max_norm:
        for p, n in zip(parts, sizes):
            p[:n] *= max_norm / norm
    return norm
