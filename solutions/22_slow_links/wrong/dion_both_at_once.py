# 22.5: numbers were handed to all-reduces
import numpy as np


def dion_step(comm, p, momentum, grad, q, lr, mu, eps):
    momentum += grad
    basis = momentum @ q
    comm.all_reduce(basis)
    basis = np.linalg.qr(basis)[0]
    found = momentum.T @ basis
    momentum -= (1 - mu) * (basis @ found.T)
    message = np.concatenate([found, basis])
    comm.all_reduce(message)
    found = message[:len(found)]
    found /= np.linalg.norm(found, axis=0) + eps
    p -= lr * (basis @ found.T)
    return found
