# 07.3: the sum is made on the last rank
import numpy as np


def all_reduce(comm, x, broadcast):
    """Ranks are counted from behind."""
    me, other, distance = comm.size - 1 - comm.rank, np.empty_like(x), 1
    while distance < comm.size:
        if me % (2 * distance) == distance:
            comm.send(x, comm.rank + distance)
        elif me % (2 * distance) == 0 and me + distance < comm.size:
            comm.recv(other, comm.rank - distance)
            x += other
        distance *= 2
    broadcast(comm, x, comm.size - 1)
