# 10.3: irecv only posts the array: what comes is in it after wait()
import numpy as np


def ring_all_reduce(comm, x, combine=np.add):
    size, rank = comm.size, comm.rank
    chunks = [x[x.size * i // size:x.size * (i + 1) // size] for i in range(size)]
    for step in range(2 * (size - 1)):
        leaving, here = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        arrived = np.zeros_like(here)
        comm.irecv(arrived, (rank - 1) % size)
        comm.send(leaving, (rank + 1) % size)
        if step < size - 1:
            combine(here, arrived, out=here)
        else:
            here[...] = arrived
