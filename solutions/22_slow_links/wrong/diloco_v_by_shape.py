# 22.3: parameters of one shape share a velocity
import numpy as np


class DiLoCo:
    def __init__(self, comm, parameters, inner, every, lr=0.7, momentum=0.9):
        self.comm, self.parameters, self.inner = comm, parameters, inner
        self.every, self.lr, self.momentum = every, lr, momentum
        self.common = [p.copy() for p in parameters]
        of = {p.shape: np.zeros_like(p) for p in parameters}
        self.velocity = [of[p.shape] for p in parameters]
        self.steps, self.samples = 0, 0

    def step(self, grads, samples):
        self.inner.step(grads)
        self.steps, self.samples = self.steps + 1, self.samples + samples
        if self.steps % self.every:
            return
        moved = [(start - p).ravel() for start, p in zip(self.common, self.parameters, strict=True)]
        message = np.concatenate([*moved, [1.0]]) * self.samples
        self.comm.all_reduce(message)
        outer, at = message[:-1] / message[-1], 0
        for p, start, v in zip(self.parameters, self.common, self.velocity, strict=True):
            delta = outer[at:at + p.size].reshape(p.shape)
            v[...] = self.momentum * v + delta
            start -= self.lr * (delta + self.momentum * v)
            p[...] = start
            at += p.size
        self.samples = 0
