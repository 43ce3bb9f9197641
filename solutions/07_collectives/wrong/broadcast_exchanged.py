# 07.2: right, but with too many messages: 1 are enough
import numpy as np


def broadcast(comm, x, src):
    me = (comm.rank - src) % comm.size
    distance, has = 1, comm.rank == src
    while distance < comm.size:
        peer = me ^ distance
        if peer < comm.size:
            received = np.empty_like(x)
            work = comm.isend(x.copy(), (peer + src) % comm.size)
            comm.recv(received, (peer + src) % comm.size)
            work.wait()
            if not has and peer < distance:
                x[...], has = received, True
        distance *= 2
