# 11.1: parts[0] has shape [22]; expected [21]
import numpy as np


def part(x, rank, size):
    share = round(x.size / size + 0.5)
    padded = np.zeros(share * size)
    padded[:x.size] = x
    return padded[rank * share:(rank + 1) * share].copy()


class ShardedAdam:
    def __init__(self, comm, x, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        self.comm, self.x, self.lr, self.betas, self.eps = comm, x, lr, betas, eps
        self.m = np.zeros(round(x.size / comm.size + 0.5))
        self.v = np.zeros_like(self.m)
        self.t = 0

    def step(self, grad):
        size, share = self.comm.size, self.m.size
        padded = np.zeros(size * share)
        padded[:grad.size] = grad
        g = np.empty(share)
        self.comm.reduce_scatter(g, padded)
        self.t += 1
        beta1, beta2 = self.betas
        self.m += (1 - beta1) * (g - self.m)
        self.v += (1 - beta2) * (g * g - self.v)
        root = np.sqrt(self.v / (1 - beta2 ** self.t)) + self.eps
        mine = part(self.x, self.comm.rank, size) - self.lr * self.m / (1 - beta1 ** self.t) / root
        self.comm.all_gather(padded, mine)
        self.x[:] = padded[:self.x.size]
