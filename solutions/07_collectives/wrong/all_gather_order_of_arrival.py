# 07.4: the parts stand in the order in which they arrived
import numpy as np


def all_gather(comm, x, exchange):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    parts = [x]
    for _ in range(comm.size - 1):
        length = np.array([len(parts[-1])])
        exchange(comm, length, right, length, left)
        arriving = np.empty(length[0], x.dtype)
        exchange(comm, parts[-1], right, arriving, left)
        parts.append(arriving)
    return parts
