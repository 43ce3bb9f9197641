# 08.3: only grads[3]: each rank still has its own gradients
import numpy as np


def average_gradients(comm, grads, count):
    total = np.array([float(count)])
    comm.all_reduce(total)
    for i in range(len(grads) - 1):
        grads[i] *= count / total[0]
        comm.all_reduce(grads[i])
