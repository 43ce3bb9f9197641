# 07.4: every part is one place too far to the right
import numpy as np


def all_gather(comm, x, exchange):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    found, moving = [None] * comm.size, x
    found[comm.rank] = x
    for step in range(comm.size - 1):
        length = np.array([len(moving)])
        exchange(comm, length, right, length, left)
        arrived = np.empty(length[0], x.dtype)
        exchange(comm, moving, right, arrived, left)
        found[(comm.rank - step) % comm.size] = moving = arrived
    return found
