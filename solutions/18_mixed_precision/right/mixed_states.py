# 18.3: an object per array, both moments in one, in place
import numpy as np


class State:
    def __init__(self, value):
        self.master = np.array(value, dtype=np.float32)
        self.moments = np.zeros((2, *value.shape), dtype=np.float32)


class MixedAdam:
    def __init__(self, values, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        self.lr, self.betas, self.eps = np.float32(lr), [np.float32(b) for b in betas], np.float32(eps)
        self.states = [State(value) for value in values]
        self.params = [np.float16(state.master) for state in self.states]
        self.steps = 0

    @property
    def masters(self):
        return [state.master for state in self.states]

    def step(self, grads, scale):
        self.steps += 1
        for i in range(len(grads)):
            self.one(self.states[i], self.params[i], grads[i] / np.float32(scale))

    def one(self, state, param, g):
        for mean, beta, new in zip(state.moments, self.betas, (g, g * g), strict=True):
            mean *= beta
            mean += (1 - beta) * new
        m, v = (mean / (1 - np.float64(beta) ** self.steps)
                for mean, beta in zip(state.moments, self.betas, strict=True))
        np.sqrt(v, out=v)
        v += self.eps
        m /= v
        state.master -= (self.lr * m).astype(np.float32)
        np.copyto(param, state.master, casting="same_kind")
