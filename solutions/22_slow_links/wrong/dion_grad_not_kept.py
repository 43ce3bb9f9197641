# 22.5: the gradient has not come into it
import numpy as np


def dion_step(comm, p, momentum, grad, q, lr, mu, eps):
    whole = momentum + grad
    basis = whole @ q
    comm.all_reduce(basis)
    basis = np.linalg.qr(basis)[0]
    found = whole.T @ basis
    momentum -= (1 - mu) * (basis @ found.T)
    comm.all_reduce(found)
    found /= np.linalg.norm(found, axis=0) + eps
    p -= lr * (basis @ found.T)
    return found
