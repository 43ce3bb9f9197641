# 07.3: send and recv must name arrays of one shape and dtype
import numpy as np


def all_reduce(comm, x, broadcast):
    received = np.empty(x.shape)
    distance = 1
    while distance < comm.size:
        if comm.rank % (2 * distance) == distance:
            comm.send(x, comm.rank - distance)
        elif comm.rank % (2 * distance) == 0 and comm.rank + distance < comm.size:
            comm.recv(received, comm.rank + distance)
            x += received
        distance *= 2
    broadcast(comm, x, 0)
