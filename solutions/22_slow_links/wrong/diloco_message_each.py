# 22.3: all-reduces in
import numpy as np


class DiLoCo:
    def __init__(self, comm, parameters, inner, every, lr=0.7, momentum=0.9):
        self.comm, self.parameters, self.inner = comm, parameters, inner
        self.every, self.lr, self.momentum = every, lr, momentum
        self.common = [p.copy() for p in parameters]
        self.velocity = [np.zeros_like(p) for p in parameters]
        self.steps, self.samples = 0, 0

    def step(self, grads, samples):
        self.inner.step(grads)
        self.steps, self.samples = self.steps + 1, self.samples + samples
        if self.steps % self.every:
            return
        total = np.array([float(self.samples)])
        self.comm.all_reduce(total)
        for p, start, v in zip(self.parameters, self.common, self.velocity, strict=True):
            delta = np.array((start - p) * self.samples, order="C")
            self.comm.all_reduce(delta)
            delta /= total[0]
            v[...] = self.momentum * v + delta
            start -= self.lr * (delta + self.momentum * v)
            p[...] = start
        self.samples = 0
