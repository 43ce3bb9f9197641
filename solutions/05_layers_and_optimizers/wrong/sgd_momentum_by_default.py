# 05.3: without isn't: its default is 0
import numpy as np


class SGD:
    def __init__(self, parameters, lr, momentum=0.9):
        self.parameters, self.lr, self.momentum = parameters, lr, momentum
        self.velocities = [np.zeros_like(p) for p in parameters]

    def step(self, grads, lr=None):
        lr = self.lr if lr is None else lr
        for p, v, g in zip(self.parameters, self.velocities, grads, strict=True):
            v *= self.momentum
            v += g
            p -= lr * v
