# 07.4: are they filled up to one length?
import numpy as np


def all_gather(comm, x, exchange):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    longest = leaving = np.array([len(x)])
    for _ in range(comm.size - 1):
        arriving = np.empty_like(leaving)
        exchange(comm, leaving, right, arriving, left)
        longest, leaving = np.maximum(longest, arriving), arriving
    leaving = np.zeros(longest[0] + 1, x.dtype)
    leaving[0], leaving[1:len(x) + 1] = len(x), x
    parts = [x] * comm.size
    for step in range(comm.size - 1):
        arriving = np.empty_like(leaving)
        exchange(comm, leaving, right, arriving, left)
        parts[(comm.rank - step - 1) % comm.size] = arriving[1:int(arriving[0]) + 1]
        leaving = arriving
    return parts
