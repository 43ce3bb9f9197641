# 07.4: the list of one call holds what the next one has received
import numpy as np

ARRIVED = {}


def all_gather(comm, x, exchange):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    parts = [x] * comm.size
    for step in range(comm.size - 1):
        leaving = parts[(comm.rank - step) % comm.size]
        length = np.array([len(leaving)])
        exchange(comm, length, right, length, left)
        key = step, int(length[0]), x.dtype
        if key not in ARRIVED:
            ARRIVED[key] = np.empty(length[0], x.dtype)
        exchange(comm, leaving, right, ARRIVED[key], left)
        parts[(comm.rank - step - 1) % comm.size] = ARRIVED[key]
    return parts
