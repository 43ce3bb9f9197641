# 07.4: each rank's own is missing
import numpy as np


def all_gather(comm, x, exchange):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    parts, leaving = [None] * comm.size, x
    for step in range(comm.size - 1):
        length = np.array([len(leaving)])
        exchange(comm, length, right, length, left)
        arriving = np.empty(length[0], x.dtype)
        exchange(comm, leaving, right, arriving, left)
        parts[(comm.rank - step - 1) % comm.size] = leaving = arriving
    return parts
