# 22.5: P by the root of a Gram matrix, twice, and zeros of zeros
import numpy as np


def dion_step(comm, p, momentum, grad, q, lr, mu, eps):
    momentum += grad
    basis = momentum @ q
    comm.all_reduce(basis)
    if basis.any():
        for _ in range(2):
            basis = np.linalg.solve(np.linalg.cholesky(basis.T @ basis), basis.T).T
    found = momentum.T @ basis
    momentum -= (1 - mu) * (basis @ found.T)
    comm.all_reduce(found)
    found /= np.linalg.norm(found, axis=0) + eps
    p -= lr * (basis @ found.T)
    return found
