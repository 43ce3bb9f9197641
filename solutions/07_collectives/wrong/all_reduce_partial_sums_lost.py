# 07.3: partial sums are lost: somebody hands on the array with which he began
import numpy as np


def all_reduce(comm, x, broadcast):
    received, total = np.empty_like(x), x.copy()
    distance = 1
    while distance < comm.size:
        if comm.rank % (2 * distance) == distance:
            comm.send(x, comm.rank - distance)
        elif comm.rank % (2 * distance) == 0 and comm.rank + distance < comm.size:
            comm.recv(received, comm.rank + distance)
            total += received
        distance *= 2
    x[...] = total
    broadcast(comm, x, 0)
