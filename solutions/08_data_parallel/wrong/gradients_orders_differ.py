# 08.3: the ranks call different collectives
import numpy as np


def average_gradients(comm, grads, count):
    total = np.array([float(count)])
    comm.all_reduce(total)
    for grad in (grads if comm.rank == 0 else grads[::-1]):
        grad *= count / total[0]
        comm.all_reduce(grad)
