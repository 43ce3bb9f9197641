# 18.3: without the division by 1−β₂ᵗ, of v,
import numpy as np


class MixedAdam:
    def __init__(self, values, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        self.lr, self.betas, self.eps, self.t = lr, betas, eps, 0
        self.masters = [value.copy() for value in values]
        self.params = [value.astype(np.float16) for value in values]
        self.m = [np.zeros_like(value) for value in values]
        self.v = [np.zeros_like(value) for value in values]

    def step(self, grads, scale):
        beta1, beta2 = self.betas
        self.t += 1
        for p, master, m, v, grad in zip(self.params, self.masters, self.m, self.v, grads, strict=True):
            g = grad.astype(np.float32) / np.float32(scale)
            m += (1 - beta1) * (g - m)
            v += (1 - beta2) * (g * g - v)
            mean, square = m / (1 - beta1 ** self.t), v
            master -= self.lr * mean / (np.sqrt(square) + self.eps)
            p[...] = master
