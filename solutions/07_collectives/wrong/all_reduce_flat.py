# 07.3: right, but the messages take more than 2⌈log₂N⌉ = 4 steps
import numpy as np


def all_reduce(comm, x, broadcast):
    if comm.rank == 0:
        received = np.empty_like(x)
        for src in range(1, comm.size):
            comm.recv(received, src)
            x += received
    else:
        comm.send(x, 0)
    broadcast(comm, x, 0)
