# 10.2: right, but that is no ring
import numpy as np


def reduce_scatter(comm, x, table, exchange):
    size, rank = comm.size, comm.rank
    cut = [x.size * i // size for i in range(size + 1)]
    mine = (rank + 1) % size
    for d in range(1, size):
        dst, src = (rank + d) % size, (rank - d) % size
        target = (dst + 1) % size
        arrived = np.empty_like(x[cut[mine]:cut[mine + 1]])
        exchange(comm, x[cut[target]:cut[target + 1]].copy(), dst, arrived, src)
        x[cut[mine]:cut[mine + 1]] += arrived
