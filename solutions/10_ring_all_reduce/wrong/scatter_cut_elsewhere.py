# 10.2: x is cut at other places than chunks() cuts it
import numpy as np


def reduce_scatter(comm, x, table, exchange):
    parts = np.array_split(x, comm.size)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for send, receive in table(comm.rank, comm.size)[:comm.size - 1]:
        arrived = np.empty_like(parts[receive])
        exchange(comm, parts[send], right, arrived, left)
        parts[receive] += arrived
