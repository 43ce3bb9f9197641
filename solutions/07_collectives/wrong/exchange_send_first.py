# 07.1: rank 0 waits in send(dst=1) at your line 9
import numpy as np


def exchange(comm, outgoing, dst, incoming, src):
    if dst == comm.rank:
        incoming[...] = outgoing
        return
    comm.send(outgoing.copy(), dst)
    comm.recv(incoming, src)
