# 22.5: makes the columns of its own R of length 1, and these are summed
import numpy as np


def dion_step(comm, p, momentum, grad, q, lr, mu, eps):
    momentum += grad
    basis = momentum @ q
    comm.all_reduce(basis)
    basis = np.linalg.qr(basis)[0]
    found = momentum.T @ basis
    momentum -= (1 - mu) * (basis @ found.T)
    found /= np.linalg.norm(found, axis=0) + eps
    comm.all_reduce(found)
    p -= lr * (basis @ found.T)
    return found
