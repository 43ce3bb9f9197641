# 08.3: arrays of one shape have become one
import numpy as np


def average_gradients(comm, grads, count):
    total = np.array([float(count)])
    comm.all_reduce(total)
    by = {}
    for g in grads:
        by.setdefault(g.shape, np.zeros(g.shape))
        by[g.shape] += g * count / total[0]
    for b in by.values():
        comm.all_reduce(b)
    for g in grads:
        g[...] = by[g.shape]
