# 08.3: divided twice: every gradient is 2 times too small
import numpy as np


def average_gradients(comm, grads, count):
    total = np.array([float(count)])
    comm.all_reduce(total)
    for grad in grads:
        grad *= count / total[0]
        comm.all_reduce(grad, op="mean")
