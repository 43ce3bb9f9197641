# 22.5: a small number added before a division
import numpy as np


def orthonormal(y):
    found = np.zeros_like(y)
    for j in range(y.shape[1]):
        column = y[:, j]
        for _ in range(2):
            column = column - found[:, :j] @ (found[:, :j].T @ column)
        length = np.linalg.norm(column)
        found[:, j] = column / (length + 1e-8)
    return found


def dion_step(comm, p, momentum, grad, q, lr, mu, eps):
    momentum += grad
    basis = momentum @ q
    comm.all_reduce(basis)
    basis = orthonormal(basis)
    found = momentum.T @ basis
    momentum -= (1 - mu) * (basis @ found.T)
    comm.all_reduce(found)
    found /= np.linalg.norm(found, axis=0) + eps
    p -= lr * (basis @ found.T)
    return found
