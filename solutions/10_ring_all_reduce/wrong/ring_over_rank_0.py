# 10.3: right, but some rank sends more than 2(N-1)/N
import numpy as np


def ring_all_reduce(comm, x, combine=np.add):
    size, rank = comm.size, comm.rank
    arrived = np.empty_like(x)
    if rank == 0:
        for src in range(1, size):
            comm.recv(arrived, src)
            combine(x, arrived, out=x)
        for dst in range(1, size):
            comm.send(x, dst)
    else:
        comm.send(x, 0)
        comm.recv(x, 0)
