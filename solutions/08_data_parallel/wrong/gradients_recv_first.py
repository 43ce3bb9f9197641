# 08.3: rank 0 waits in recv(src=1) at your line 11
import numpy as np


def average_gradients(comm, grads, count):
    total = np.array([float(count)])
    comm.all_reduce(total)
    for grad in grads:
        grad *= count / total[0]
        other = np.empty_like(grad)
        comm.recv(other, src=comm.rank ^ 1)
        comm.send(grad, dst=comm.rank ^ 1)
        grad += other
