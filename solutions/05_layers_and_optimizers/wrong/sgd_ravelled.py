# 05.3: p.ravel() and p.reshape(-1) of an array that lies by columns
import numpy as np


class SGD:
    def __init__(self, parameters, lr, momentum=0.0):
        self.parameters, self.lr, self.momentum = parameters, lr, momentum
        self.velocities = [np.zeros_like(p) for p in parameters]

    def step(self, grads, lr=None):
        lr = self.lr if lr is None else lr
        for p, v, g in zip(self.parameters, self.velocities, grads, strict=True):
            v *= self.momentum
            v += g
            flat = p.ravel()
            flat -= (lr * v).ravel()
