# 11.3: a max_norm of 0 is taken for none
import numpy as np


def clip(comm, parts, sizes, max_norm):
    squares = np.array([sum(float(np.sum(p[:n] ** 2)) for p, n in zip(parts, sizes, strict=True))])
    comm.all_reduce(squares)
    norm = float(np.sqrt(squares.item()))
    if max_norm and norm > max_norm:
        for p, n in zip(parts, sizes, strict=True):
            p[:n] *= max_norm / norm
    return norm
