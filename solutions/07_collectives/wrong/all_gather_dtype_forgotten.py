# 07.4: send and recv must name arrays of one shape and dtype
import numpy as np


def all_gather(comm, x, exchange):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    parts, leaving = [x] * comm.size, x
    for step in range(comm.size - 1):
        length = np.array([len(leaving)])
        exchange(comm, length, right, length, left)
        arriving = np.empty(length[0])
        exchange(comm, leaving, right, arriving, left)
        parts[(comm.rank - step - 1) % comm.size] = leaving = arriving
    return parts
