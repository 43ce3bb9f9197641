# 22.5: and is left so; but eps is to be added
import numpy as np


def dion_step(comm, p, momentum, grad, q, lr, mu, eps):
    momentum += grad
    basis = momentum @ q
    comm.all_reduce(basis)
    basis = np.linalg.qr(basis)[0]
    found = momentum.T @ basis
    momentum -= (1 - mu) * (basis @ found.T)
    comm.all_reduce(found)
    length = np.linalg.norm(found, axis=0)
    found = np.divide(found, length, out=np.zeros_like(found), where=length > 0)
    p -= lr * (basis @ found.T)
    return found
