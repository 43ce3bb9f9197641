# 10.3: the chunks aren't as even as they can be
import numpy as np


def ring_all_reduce(comm, x, combine=np.add):
    size, rank = comm.size, comm.rank
    n = x.size // size
    chunks = [x[n * i:n * (i + 1)] for i in range(size - 1)] + [x[n * (size - 1):]]
    for step in range(2 * (size - 1)):
        leaving, here = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        arrived = np.empty_like(here)
        work = comm.isend(leaving, (rank + 1) % size)
        comm.recv(arrived, (rank - 1) % size)
        work.wait()
        if step < size - 1:
            combine(here, arrived, out=here)
        else:
            here[...] = arrived
