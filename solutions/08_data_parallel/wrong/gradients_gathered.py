# 08.3: right, but with more messages than needed
import numpy as np


def average_gradients(comm, grads, count):
    total = np.array([float(count)])
    comm.all_reduce(total)
    for grad in grads:
        grad *= count / total[0]
        for row in grad.reshape(-1, 1):
            comm.all_reduce(row)
