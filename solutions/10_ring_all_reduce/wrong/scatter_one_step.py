# 10.2: after 1 of 3 steps chunk rank + 1 hasn't come to its rank yet
import numpy as np


def chunks(x, size):
    return [x[x.size * i // size:x.size * (i + 1) // size] for i in range(size)]


def reduce_scatter(comm, x, table, exchange):
    parts = chunks(x, comm.size)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for send, receive in table(comm.rank, comm.size)[:1]:
        arrived = np.empty_like(parts[receive])
        exchange(comm, parts[send], right, arrived, left)
        parts[receive] += arrived
