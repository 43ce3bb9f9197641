# 22.5: neither B Q nor R is summed
import numpy as np


def dion_step(comm, p, momentum, grad, q, lr, mu, eps):
    momentum += grad
    basis = momentum @ q
    basis = np.linalg.qr(basis)[0]
    found = momentum.T @ basis
    momentum -= (1 - mu) * (basis @ found.T)
    found /= np.linalg.norm(found, axis=0) + eps
    p -= lr * (basis @ found.T)
    return found
