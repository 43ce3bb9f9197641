# 10.2: right, but with too many messages
import numpy as np


def chunks(x, size):
    return [x[x.size * i // size:x.size * (i + 1) // size] for i in range(size)]


def reduce_scatter(comm, x, table, exchange):
    parts = chunks(x, comm.size)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for step, (send, receive) in enumerate(table(comm.rank, comm.size)):
        arrived = np.empty_like(parts[receive])
        exchange(comm, parts[send], right, arrived, left)
        if step < comm.size - 1:
            parts[receive] += arrived
        else:
            parts[receive][...] = arrived
