# 07.3: exchange with rank XOR distance, with partners for those beyond a power of two
import numpy as np


def all_reduce(comm, x, broadcast):
    """Exchanges with rank XOR distance; who is beyond the largest power of two gives to and takes from a partner."""
    inner = 1 << comm.size.bit_length() - 1
    extra, other = comm.size - inner, np.empty_like(x)
    if comm.rank >= inner:
        comm.send(x, comm.rank - inner)
        comm.recv(x, comm.rank - inner)
        return
    if comm.rank < extra:
        comm.recv(other, comm.rank + inner)
        x += other
    distance = 1
    while distance < inner:
        work = comm.isend(x, comm.rank ^ distance)
        comm.recv(other, comm.rank ^ distance)
        work.wait()
        x += other
        distance *= 2
    if comm.rank < extra:
        comm.send(x, comm.rank + inner)
