# 07.3: rank 0 waits in send(dst=1) at your line 11
import numpy as np


def all_reduce(comm, x, broadcast):
    received = np.empty_like(x)
    distance = 1
    while distance < comm.size:
        peer = comm.rank ^ distance
        if peer < comm.size:
            comm.send(x, peer)
            comm.recv(received, peer)
            x += received
        distance *= 2
