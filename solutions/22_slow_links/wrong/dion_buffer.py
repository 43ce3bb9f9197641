# 22.5: overwritten by the next call
import numpy as np

BUFFERS = {}


def dion_step(comm, p, momentum, grad, q, lr, mu, eps):
    momentum += grad
    basis = momentum @ q
    comm.all_reduce(basis)
    basis = np.linalg.qr(basis)[0]
    found = momentum.T @ basis
    momentum -= (1 - mu) * (basis @ found.T)
    comm.all_reduce(found)
    found /= np.linalg.norm(found, axis=0) + eps
    p -= lr * (basis @ found.T)
    buffer = BUFFERS.setdefault(found.shape, np.empty_like(found))
    buffer[...] = found
    return buffer
