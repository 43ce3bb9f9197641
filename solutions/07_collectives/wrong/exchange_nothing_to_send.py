# 07.1: rank 0 has returned already
import numpy as np


def exchange(comm, outgoing, dst, incoming, src):
    if dst == comm.rank:
        incoming[...] = outgoing
        return
    if not outgoing.size:
        return
    leaving = outgoing.copy() if np.shares_memory(outgoing, incoming) else outgoing
    work = comm.isend(leaving, dst)
    comm.recv(incoming, src)
    work.wait()
