# 07.1: send and recv must name arrays of one shape and dtype
import numpy as np


def exchange(comm, outgoing, dst, incoming, src):
    if dst == comm.rank:
        incoming[...] = outgoing
        return
    leaving = outgoing.copy() if np.shares_memory(outgoing, incoming) else outgoing
    work = comm.isend(leaving, dst)
    buffer = np.empty_like(outgoing)
    comm.recv(buffer, src)
    incoming[...] = buffer
    work.wait()
