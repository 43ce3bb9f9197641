# 07.3: on 5 ranks the last ones are left out
import numpy as np


def all_reduce(comm, x, broadcast):
    received = np.empty_like(x)
    for distance in (1 << k for k in range(round(np.log2(comm.size)))):
        if comm.rank % (2 * distance) == distance:
            comm.send(x, comm.rank - distance)
        elif comm.rank % (2 * distance) == 0 and comm.rank + distance < comm.size:
            comm.recv(received, comm.rank + distance)
            x += received
    broadcast(comm, x, 0)
