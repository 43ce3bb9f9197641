# 07.3: arrays are counted more than once: if sums go round the ring
import numpy as np


def all_reduce(comm, x, broadcast):
    received = np.empty_like(x)
    for _ in range(comm.size - 1):
        work = comm.isend(x.copy(), (comm.rank + 1) % comm.size)
        comm.recv(received, (comm.rank - 1) % comm.size)
        work.wait()
        x += received
