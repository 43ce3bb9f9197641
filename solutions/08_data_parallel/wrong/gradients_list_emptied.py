# 08.3: the list has lost arrays
import numpy as np


def average_gradients(comm, grads, count):
    total = np.array([float(count)])
    comm.all_reduce(total)
    while grads:
        grad = grads.pop()
        grad *= count / total[0]
        comm.all_reduce(grad)
