# 22.5: columns of P turned so that the triangle's diagonal is above 0
import numpy as np


def dion_step(comm, p, momentum, grad, q, lr, mu, eps):
    momentum += grad
    basis = momentum @ q
    comm.all_reduce(basis)
    basis, triangle = np.linalg.qr(basis)
    basis = basis * np.where(np.diag(triangle) < 0, -1.0, 1.0)
    found = momentum.T @ basis
    momentum -= (1 - mu) * (basis @ found.T)
    comm.all_reduce(found)
    found /= np.linalg.norm(found, axis=0) + eps
    p -= lr * (basis @ found.T)
    return found
