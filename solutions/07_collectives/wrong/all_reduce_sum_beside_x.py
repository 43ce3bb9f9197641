# 07.3: added in an array of its own that isn't x
import numpy as np


def all_reduce(comm, x, broadcast):
    received, total = np.empty_like(x), np.zeros_like(x)
    distance = 1
    while distance < comm.size:
        if comm.rank % (2 * distance) == distance:
            comm.send(x, comm.rank - distance)
        elif comm.rank % (2 * distance) == 0 and comm.rank + distance < comm.size:
            comm.recv(received, comm.rank + distance)
            total[...] = x + received
        distance *= 2
    broadcast(comm, x, 0)
