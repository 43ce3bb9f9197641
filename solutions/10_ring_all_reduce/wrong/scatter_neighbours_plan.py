# 10.2: another chunk is complete instead
import numpy as np


def reduce_scatter(comm, x, table, exchange):
    n = comm.size
    parts = [x[x.size * i // n:x.size * (i + 1) // n] for i in range(n)]
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for send, receive in table((comm.rank - 1) % n, comm.size)[:comm.size - 1]:
        arrived = np.empty_like(parts[receive])
        exchange(comm, parts[send], right, arrived, left)
        parts[receive] += arrived
