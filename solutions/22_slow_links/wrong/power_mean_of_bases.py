# 22.2: a mean of orthonormal columns has none any more
import numpy as np


def numbers(shape, rank):
    if len(shape) < 2:
        return int(np.prod(shape))
    n, m = shape[0], int(np.prod(shape[1:]))
    return min(n * m, rank * (n + m))


class PowerSGD:
    def __init__(self, comm, q):
        self.comm, self.q, self.left_out = comm, q.copy(), 0.0

    def sum(self, grad):
        m = grad + self.left_out
        p = np.linalg.qr(m @ self.q)[0]
        self.comm.all_reduce(p)
        p /= self.comm.size
        own = m.T @ p
        self.q = own.copy()
        self.comm.all_reduce(self.q)
        self.left_out = m - p @ own.T
        return p @ self.q.T
