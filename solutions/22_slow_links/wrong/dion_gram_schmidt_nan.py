# 22.5: wrong where there is no gradient at all
import numpy as np


def dion_step(comm, p, momentum, grad, q, lr, mu, eps):
    momentum += grad
    basis = momentum @ q
    comm.all_reduce(basis)
    for j in range(basis.shape[1]):
        for _ in range(2):
            basis[:, j] -= basis[:, :j] @ (basis[:, :j].T @ basis[:, j])
        basis[:, j] /= np.linalg.norm(basis[:, j])
    found = momentum.T @ basis
    momentum -= (1 - mu) * (basis @ found.T)
    comm.all_reduce(found)
    found /= np.linalg.norm(found, axis=0) + eps
    p -= lr * (basis @ found.T)
    return found
