# 07.3: on 3 ranks some have no partner in rank XOR distance
import numpy as np


def all_reduce(comm, x, broadcast):
    received = np.empty_like(x)
    distance = 1
    while distance < comm.size:
        peer = comm.rank ^ distance
        if peer < comm.size:
            work = comm.isend(x.copy(), peer)
            comm.recv(received, peer)
            work.wait()
            x += received
        distance *= 2
