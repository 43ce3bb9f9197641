# 22.5: B is M - G: then p goes up the gradient
import numpy as np


def dion_step(comm, p, momentum, grad, q, lr, mu, eps):
    momentum -= grad
    basis = momentum @ q
    comm.all_reduce(basis)
    basis = np.linalg.qr(basis)[0]
    found = momentum.T @ basis
    momentum -= (1 - mu) * (basis @ found.T)
    comm.all_reduce(found)
    found /= np.linalg.norm(found, axis=0) + eps
    p -= lr * (basis @ found.T)
    return found
