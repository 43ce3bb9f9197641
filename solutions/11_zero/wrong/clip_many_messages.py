# 11.3: one number per rank is enough
import numpy as np


def clip(comm, parts, sizes, max_norm):
    squares = np.zeros(1)
    for p, n in zip(parts, sizes):
        of_one = np.array([np.sum(p[:n] ** 2)])
        comm.all_reduce(of_one)
        squares += of_one
    norm = float(np.sqrt(squares[0]))
    if norm > max_norm:
        for p, n in zip(parts, sizes):
            p[:n] *= max_norm / norm
    return norm
