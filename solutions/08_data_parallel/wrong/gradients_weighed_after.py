# 08.3: weighed after the sum
import numpy as np


def average_gradients(comm, grads, count):
    total = np.array([count])
    comm.all_reduce(total)
    for g in grads:
        comm.all_reduce(g)
        g *= count / total
