# 07.1: incoming is still what it was
import numpy as np


def exchange(comm, outgoing, dst, incoming, src):
    if dst == comm.rank:
        incoming = outgoing.copy()
        return
    received = np.empty_like(incoming)
    work = comm.isend(outgoing, dst)
    comm.recv(received, src)
    work.wait()
    incoming = received
