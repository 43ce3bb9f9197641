# 07.4: all lengths go round before the parts
import numpy as np


def all_gather(comm, x, exchange):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    lengths, number = {comm.rank: len(x)}, np.array([len(x)])
    for step in range(1, comm.size):
        exchange(comm, number, right, number, left)
        lengths[(comm.rank - step) % comm.size] = int(number[0])
    parts = {comm.rank: x}
    for step in range(1, comm.size):
        arriving = np.zeros(lengths[(comm.rank - step) % comm.size], dtype=x.dtype)
        exchange(comm, x, right, arriving, left)
        parts[(comm.rank - step) % comm.size] = x = arriving
    return tuple(parts[rank] for rank in range(comm.size))
