# 11.3: a gradient shorter than max_norm was made longer
import numpy as np


def clip(comm, parts, sizes, max_norm):
    squares = np.array([sum(float(np.sum(p[:n] ** 2)) for p, n in zip(parts, sizes))])
    comm.all_reduce(squares)
    norm = float(np.sqrt(squares[0]))
    if norm > 0:
        for p, n in zip(parts, sizes):
            p[:n] *= max_norm / norm
    return norm
