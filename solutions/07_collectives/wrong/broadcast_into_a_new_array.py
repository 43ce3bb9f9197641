# 07.2: no rank but src has received anything
import numpy as np


def broadcast(comm, x, src):
    me = (comm.rank - src) % comm.size
    distance = 1
    while distance < comm.size:
        if me < distance and me + distance < comm.size:
            comm.send(x, (me + distance + src) % comm.size)
        elif distance <= me < 2 * distance:
            received = np.empty_like(x)
            comm.recv(received, (me - distance + src) % comm.size)
            x = received
        distance *= 2
