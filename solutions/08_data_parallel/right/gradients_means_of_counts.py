# 08.3: by the means of counts and of weighed gradients
import numpy as np


def average_gradients(comm, grads, count):
    mean = np.array([count], float)
    comm.all_reduce(mean, op="mean")
    for grad in grads:
        np.multiply(grad, count / mean, out=grad)
        comm.all_reduce(grad, op="mean")
