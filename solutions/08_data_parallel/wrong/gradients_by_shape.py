# 08.3: arrays of one shape have become one
import numpy as np


def average_gradients(comm, grads, count):
    total = np.array([float(count)])
    comm.all_reduce(total)
    buffers = {g.shape: g * count / total[0] for g in grads}
    for b in buffers.values():
        comm.all_reduce(b)
    for g in grads:
        g[...] = buffers[g.shape]
