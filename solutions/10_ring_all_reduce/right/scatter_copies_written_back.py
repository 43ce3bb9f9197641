# 10.2: copies are added up, the complete one is written back
import numpy as np


def chunks(x, size):
    return [x[x.size * i // size:x.size * (i + 1) // size] for i in range(size)]


def reduce_scatter(comm, x, table, exchange):
    size, rank = comm.size, comm.rank
    if size == 1:
        return x
    parts = [p.copy() for p in chunks(x, size)]
    for send, receive in list(table(rank, size))[:size - 1]:
        inbox = np.zeros(parts[receive].shape, x.dtype)
        exchange(comm, parts[send].copy(), (rank + 1) % size, inbox, rank - 1 if rank else size - 1)
        parts[receive] = np.add(inbox, parts[receive])
    chunks(x, size)[(rank + 1) % size][:] = parts[(rank + 1) % size]
    return x
