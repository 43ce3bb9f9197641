# 07.3: the upper half sends to the lower one, which is cut again
import numpy as np


def all_reduce(comm, x, broadcast):
    rest, me = (comm.size, comm.rank)
    while rest > 1:
        keep = (rest + 1) // 2
        if keep <= me < rest:
            comm.send(x, me - keep)
        elif me + keep < rest:
            other = np.zeros_like(x)
            comm.recv(other, me + keep)
            np.add(x, other, out=x)
        rest = keep
    broadcast(comm, x, 0)
