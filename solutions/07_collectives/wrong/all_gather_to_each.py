# 07.4: some rank sends its own part to several others
import numpy as np


def all_gather(comm, x, exchange):
    parts = [x] * comm.size
    for d in range(1, comm.size):
        to, source = (comm.rank + d) % comm.size, (comm.rank - d) % comm.size
        length = np.array([len(x)])
        exchange(comm, length, to, length, source)
        parts[source] = np.empty(length[0], x.dtype)
        exchange(comm, x, to, parts[source], source)
    return parts
