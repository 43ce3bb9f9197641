# 10.3: what is there, in x itself, and only in the second
import numpy as np


def ring_all_reduce(comm, x, combine=np.add):
    size, rank = comm.size, comm.rank
    chunks = [x[x.size * i // size:x.size * (i + 1) // size] for i in range(size)]
    for step in range(2 * (size - 1)):
        leaving, here = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        arrived = np.empty_like(here)
        work = comm.isend(leaving, (rank + 1) % size)
        comm.recv(arrived, (rank - 1) % size)
        work.wait()
        if step < size - 1:
            combine(here, arrived, out=arrived)
        else:
            here[...] = arrived
