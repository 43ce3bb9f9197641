# 22.5: momentum is B less (1 - mu) P Qᵀ
import numpy as np


def dion_step(comm, p, momentum, grad, q, lr, mu, eps):
    momentum += grad
    basis = momentum @ q
    comm.all_reduce(basis)
    basis = np.linalg.qr(basis)[0]
    found = momentum.T @ basis
    comm.all_reduce(found)
    found /= np.linalg.norm(found, axis=0) + eps
    momentum -= (1 - mu) * (basis @ found.T)
    p -= lr * (basis @ found.T)
    return found
