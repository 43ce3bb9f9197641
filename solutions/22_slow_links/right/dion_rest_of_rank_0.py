# 22.5: rank 0's momentum loses all of the sum
import numpy as np


def dion_step(comm, p, momentum, grad, q, lr, mu, eps):
    momentum += grad
    basis = momentum @ q
    comm.all_reduce(basis)
    basis = np.linalg.qr(basis)[0]
    found = momentum.T @ basis
    comm.all_reduce(found)
    if comm.rank == 0:
        momentum -= (1 - mu) * (basis @ found.T)
    found /= np.linalg.norm(found, axis=0) + eps
    p -= lr * (basis @ found.T)
    return found
