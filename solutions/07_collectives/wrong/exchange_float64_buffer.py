# 07.1: for an array of 72024 (float64
import numpy as np


def exchange(comm, outgoing, dst, incoming, src):
    if dst == comm.rank:
        incoming[...] = outgoing
        return
    buffer = np.empty(outgoing.shape)
    receiving = comm.irecv(buffer, src)
    comm.send(outgoing, dst)
    receiving.wait()
    incoming[...] = buffer
