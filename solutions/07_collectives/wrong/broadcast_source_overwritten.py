# 07.2: src itself has lost its data
import numpy as np


def broadcast(comm, x, src):
    me = (comm.rank - src) % comm.size
    x[...] = 0
    distance = 1
    while distance < comm.size:
        if me < distance and me + distance < comm.size:
            comm.send(x, (me + distance + src) % comm.size)
        elif distance <= me < 2 * distance:
            comm.recv(x, (me - distance + src) % comm.size)
        distance *= 2
