# 10.2: no message is sent
import numpy as np


def chunks(x, size):
    return [x[x.size * i // size:x.size * (i + 1) // size] for i in range(size)]


def reduce_scatter(comm, x, table, exchange):
    return chunks(x, comm.size)[(comm.rank + 1) % comm.size]
