# 07.1: got more than 0 bytes for an array of 0
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
