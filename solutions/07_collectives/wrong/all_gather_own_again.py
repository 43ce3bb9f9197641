# 07.4: every rank has its left neighbour's part again and again
import numpy as np


def all_gather(comm, x, exchange):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    parts = [x] * comm.size
    for step in range(comm.size - 1):
        length = np.array([len(x)])
        exchange(comm, length, right, length, left)
        arriving = np.empty(length[0], x.dtype)
        exchange(comm, x, right, arriving, left)
        parts[(comm.rank - step - 1) % comm.size] = arriving
    return parts
