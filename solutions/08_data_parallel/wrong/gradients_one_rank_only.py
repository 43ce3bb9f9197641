# 08.3: only on rank 1: each rank weighed its own gradients
import numpy as np


def average_gradients(comm, grads, count):
    total = np.array([float(count)])
    comm.all_reduce(total)
    for grad in grads:
        grad *= count / total[0]
        comm.reduce(grad, dst=0)
