# 22.3: and that is remembered as its beginning
import numpy as np


class DiLoCo:
    def __init__(self, comm, parameters, inner, every, lr=0.7, momentum=0.9):
        self.comm, self.parameters, self.inner = comm, parameters, inner
        self.every, self.lr, self.momentum = every, lr, momentum
        self.begin = [p.copy() for p in parameters]
        self.velocity = [np.zeros_like(p) for p in parameters]
        self.steps = self.samples = 0

    def step(self, grads, samples):
        self.inner.step(grads)
        self.steps += 1
        self.samples += samples
        if self.steps % self.every:
            return
        ways = [(begin - p).ravel() * self.samples for begin, p in zip(self.begin, self.parameters, strict=True)]
        flat = np.concatenate([*ways, [float(self.samples)]])
        self.comm.all_reduce(flat)
        outer, at = flat[:-1] / flat[-1], 0
        for i, (p, v) in enumerate(zip(self.parameters, self.velocity, strict=True)):
            delta = outer[at:at + p.size].reshape(p.shape)
            at += p.size
            v *= self.momentum
            v += delta
            p -= self.lr * (delta + self.momentum * v)
            self.begin[i] = p.copy()
        self.samples = 0
