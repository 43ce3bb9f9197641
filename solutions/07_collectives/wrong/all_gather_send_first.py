# 07.4: rank 0 waits in send(dst=1) at your line 13
import numpy as np


def all_gather(comm, x, exchange):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    parts, leaving = [x] * comm.size, x
    for step in range(comm.size - 1):
        comm.send(np.array([len(leaving)]), right)
        length = np.empty(1, int)
        comm.recv(length, left)
        arriving = np.empty(length[0], x.dtype)
        comm.send(leaving, right)
        comm.recv(arriving, left)
        parts[(comm.rank - step - 1) % comm.size] = leaving = arriving
    return parts
