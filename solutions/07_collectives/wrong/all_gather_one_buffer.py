# 07.4: all entries are views of one array
import numpy as np


def all_gather(comm, x, exchange):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    buffer = np.empty(10_000, x.dtype)
    parts = [x] * comm.size
    leaving = x.copy()
    for step in range(comm.size - 1):
        length = np.array([len(leaving)])
        exchange(comm, length, right, length, left)
        arriving = buffer[:length[0]]
        exchange(comm, leaving, right, arriving, left)
        parts[(comm.rank - step - 1) % comm.size] = arriving
        leaving = arriving.copy()
    return parts
