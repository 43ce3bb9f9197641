# 07.1: a posted message is never waited for
import numpy as np


def exchange(comm, outgoing, dst, incoming, src):
    if dst == comm.rank:
        incoming[...] = outgoing
        return
    leaving = outgoing.copy() if np.shares_memory(outgoing, incoming) else outgoing
    work = comm.isend(leaving, dst)
    comm.irecv(incoming, src)
    work.wait()
