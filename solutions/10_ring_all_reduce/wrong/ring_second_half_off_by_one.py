# 10.3: the second half begins with the wrong chunk
import numpy as np


def ring_all_reduce(comm, x, combine=np.add):
    size, rank = comm.size, comm.rank
    chunks = [x[x.size * i // size:x.size * (i + 1) // size] for i in range(size)]
    for half in range(2):
        for step in range(size - 1):
            leaving, here = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
            arrived = np.empty_like(here)
            work = comm.isend(leaving, (rank + 1) % size)
            comm.recv(arrived, (rank - 1) % size)
            work.wait()
            if half == 0:
                combine(here, arrived, out=here)
            else:
                here[...] = arrived
