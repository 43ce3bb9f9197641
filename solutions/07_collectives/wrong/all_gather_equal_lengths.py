# 07.4: send and recv must name arrays of one shape and dtype
import numpy as np


def all_gather(comm, x, exchange):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    parts = [x] * comm.size
    for step in range(comm.size - 1):
        arriving = np.empty_like(x)
        exchange(comm, parts[(comm.rank - step) % comm.size], right, arriving, left)
        parts[(comm.rank - step - 1) % comm.size] = arriving
    return parts
