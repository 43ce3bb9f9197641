# 07.4: each part goes all the way round, back to its owner
import numpy as np


def all_gather(comm, x, exchange):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    parts = [x] * comm.size
    for step in range(comm.size):
        leaving = parts[(comm.rank - step) % comm.size]
        length = np.array([len(leaving)])
        exchange(comm, length, right, length, left)
        arriving = np.empty(length[0], x.dtype)
        exchange(comm, leaving, right, arriving, left)
        parts[(comm.rank - step - 1) % comm.size] = arriving
    return parts
