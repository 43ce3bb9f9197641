# 07.2: the data doesn't reach all ranks
import numpy as np


def broadcast(comm, x, src):
    me = (comm.rank - src) % comm.size
    for k in range(round(np.log2(comm.size))):
        distance = 2 ** k
        if me < distance:
            if me + distance < comm.size:
                comm.send(x, (me + distance + src) % comm.size)
        elif me < 2 * distance:
            comm.recv(x, (me - distance + src) % comm.size)
