# 07.3: on 7 ranks some have no partner in rank XOR distance
import numpy as np


def all_reduce(comm, x, broadcast):
    """An odd rank gives its array to rank 0 and gets the sum in the end; the others exchange with rank XOR distance."""
    other, even = np.empty_like(x), comm.size - comm.size % 2 if comm.size > 1 else 1
    if comm.rank >= even:
        comm.send(x, 0)
    elif comm.rank == 0 and even < comm.size:
        comm.recv(other, even)
        x += other
    distance = 1
    while distance < even and comm.rank < even:
        partner = comm.rank ^ distance
        if partner < even:
            work = comm.isend(x.copy(), partner)
            comm.recv(other, partner)
            work.wait()
            x += other
        distance *= 2
    if comm.rank >= even:
        comm.recv(x, 0)
    elif comm.rank == 0 and even < comm.size:
        comm.send(x, even)
