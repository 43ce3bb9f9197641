# 11.3: each part is clipped by itself
import numpy as np


def clip(comm, parts, sizes, max_norm):
    squares = np.array([sum(float(np.sum(p[:n] ** 2)) for p, n in zip(parts, sizes))])
    comm.all_reduce(squares)
    norm = float(np.sqrt(squares[0]))
    for p, n in zip(parts, sizes):
        length = np.linalg.norm(p[:n])
        if length > max_norm:
            p[:n] *= max_norm / length
    return norm
