# 22.5: the right steps, but 48 numbers were handed to an all-reduce at once
import numpy as np


def dion_step(comm, p, momentum, grad, q, lr, mu, eps):
    momentum += grad
    basis = momentum @ q
    comm.all_reduce(basis)
    basis = np.linalg.qr(basis)[0]
    found = momentum.T @ basis
    momentum -= (1 - mu) * (basis @ found.T)
    comm.all_reduce(found)
    found /= np.linalg.norm(found, axis=0) + eps
    delta = lr * (basis @ found.T)
    comm.all_reduce(delta, "mean")
    p -= delta
    return found
