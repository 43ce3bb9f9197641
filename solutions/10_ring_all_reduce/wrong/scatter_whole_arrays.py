# 10.2: right, but every rank sends more than 0.75 times the array
import numpy as np


def chunks(x, size):
    return [x[x.size * i // size:x.size * (i + 1) // size] for i in range(size)]


def reduce_scatter(comm, x, table, exchange):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    leaving = x.copy()
    for _ in range(comm.size - 1):
        arrived = np.empty_like(x)
        exchange(comm, leaving, right, arrived, left)
        x += arrived
        leaving = arrived
