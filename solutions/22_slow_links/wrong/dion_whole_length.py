# 22.5: P is divided by its length as a whole
import numpy as np


def dion_step(comm, p, momentum, grad, q, lr, mu, eps):
    momentum += grad
    basis = momentum @ q
    comm.all_reduce(basis)
    basis = basis / max(np.linalg.norm(basis), 1e-300)
    found = momentum.T @ basis
    momentum -= (1 - mu) * (basis @ found.T)
    comm.all_reduce(found)
    found /= np.linalg.norm(found, axis=0) + eps
    p -= lr * (basis @ found.T)
    return found
