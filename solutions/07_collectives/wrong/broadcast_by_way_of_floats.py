# 07.2: in case 5 of 5
import numpy as np


def broadcast(comm, x, src):
    me, values = (comm.rank - src) % comm.size, np.zeros(x.shape)
    if me == 0:
        values[...] = x
    distance = 1
    while distance < comm.size:
        if me < distance:
            if me + distance < comm.size:
                comm.send(values, (me + distance + src) % comm.size)
        elif me < 2 * distance:
            comm.recv(values, (me - distance + src) % comm.size)
        distance *= 2
    x[...] = values
