# 10.2: irecv only posts the array: what comes is in it after wait()
import numpy as np


def chunks(x, size):
    return [x[x.size * i // size:x.size * (i + 1) // size] for i in range(size)]


def reduce_scatter(comm, x, table, exchange):
    size, rank, parts = comm.size, comm.rank, chunks(x, comm.size)
    for leaving, here in table(rank, size)[:size - 1]:
        arrived = np.zeros_like(parts[here])
        comm.irecv(arrived, (rank - 1) % size)
        comm.send(parts[leaving], (rank + 1) % size)
        parts[here] += arrived
