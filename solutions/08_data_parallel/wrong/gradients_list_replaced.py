# 08.3: grads[i] = … puts one into the list
import numpy as np


def average_gradients(comm, grads, count):
    total = np.array([float(count)])
    comm.all_reduce(total)
    for i, grad in enumerate(grads):
        grads[i] = grad * (count / total[0])
        comm.all_reduce(grads[i])
