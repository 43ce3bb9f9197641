# 05.4: p.ravel() and p.reshape(-1) of an array that lies by columns
import numpy as np


class Adam:

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, decoupled=False):
        self.parameters, self.lr, self.betas, self.eps = parameters, lr, betas, eps
        self.weight_decay, self.decoupled = weight_decay, decoupled
        self.m = [np.zeros_like(p) for p in parameters]
        self.v = [np.zeros_like(p) for p in parameters]
        self.t = 0

    def step(self, grads, lr=None):
        lr = self.lr if lr is None else lr
        beta1, beta2 = self.betas
        self.t += 1
        for p, g, m, v in zip(self.parameters, grads, self.m, self.v, strict=True):
            if self.decoupled:
                p *= 1 - lr * self.weight_decay
            else:
                g = g + self.weight_decay * p
            m += (1 - beta1) * (g - m)
            v += (1 - beta2) * (g * g - v)
            mean, square = m / (1 - beta1 ** self.t), v / (1 - beta2 ** self.t)
            flat = p.reshape(-1)
            flat -= (lr * mean / (np.sqrt(square) + self.eps)).reshape(-1)
