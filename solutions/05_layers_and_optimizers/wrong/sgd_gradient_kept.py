# 05.3: the first velocity is the caller's gradient array itself
import numpy as np


class SGD:
    def __init__(self, parameters, lr, momentum=0.0):
        self.parameters, self.lr, self.momentum = parameters, lr, momentum
        self.velocities = [None] * len(parameters)

    def step(self, grads, lr=None):
        lr = self.lr if lr is None else lr
        for i, (p, g) in enumerate(zip(self.parameters, grads, strict=True)):
            v = self.velocities[i]
            self.velocities[i] = g if v is None else self.momentum * v + g
            p -= lr * self.velocities[i]
