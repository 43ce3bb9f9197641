# 22.5: both sums in one buffer's two ends
import numpy as np


def dion_step(comm, p, momentum, grad, q, lr, mu, eps):
    momentum += grad
    buffer = np.empty((sum(p.shape), q.shape[1]))
    basis, found = buffer[:len(p)], buffer[len(p):]
    np.matmul(momentum, q, out=basis)
    comm.all_reduce(basis)
    basis = np.linalg.qr(basis)[0]
    np.matmul(momentum.T, basis, out=found)
    momentum -= (1 - mu) * (basis @ found.T)
    comm.all_reduce(found)
    found /= np.linalg.norm(found, axis=0) + eps
    p -= lr * (basis @ found.T)
    return found.copy()
