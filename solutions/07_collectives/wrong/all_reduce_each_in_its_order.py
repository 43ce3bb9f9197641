# 07.3: not equal to the last bit on rank 0
import numpy as np


def all_reduce(comm, x, broadcast):
    going, received = x.copy(), np.empty_like(x)
    for _ in range(comm.size - 1):
        work = comm.isend(going, (comm.rank + 1) % comm.size)
        comm.recv(received, (comm.rank - 1) % comm.size)
        work.wait()
        going[...] = received
        x += received
