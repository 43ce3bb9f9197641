# 07.1: the receive is posted first, into an array of its own
import numpy as np


def exchange(comm, outgoing, dst, incoming, src):
    if dst == comm.rank:
        np.copyto(incoming, outgoing)
        return
    buffer = np.empty_like(incoming)
    receiving = comm.irecv(buffer, src)
    comm.send(outgoing, dst)
    receiving.wait()
    incoming[...] = buffer
