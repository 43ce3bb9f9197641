# 11.1: the ranks call different collectives
import numpy as np


def part(x, rank, size):
    share = -(-x.size // size)
    mine = x[rank * share:(rank + 1) * share]
    return np.concatenate([mine, np.zeros(share - mine.size)])


class ShardedAdam:
    def __init__(self, comm, x, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        self.comm, self.x, self.lr, self.betas, self.eps = comm, x, lr, betas, eps
        self.m = np.zeros(-(-x.size // comm.size))
        self.v = np.zeros_like(self.m)
        self.t = 0

    def step(self, grad):
        if not grad.any():
            return
        rank, size, n, (beta1, beta2) = self.comm.rank, self.comm.size, self.x.size, self.betas
        whole = np.zeros(self.m.size * size)
        whole[:n] = grad
        g = np.empty_like(self.m)
        self.comm.reduce_scatter(g, whole)
        self.t += 1
        self.m += (1 - beta1) * (g - self.m)
        self.v += (1 - beta2) * (g * g - self.v)
        mean, square = self.m / (1 - beta1 ** self.t), self.v / (1 - beta2 ** self.t)
        mine = part(self.x, rank, size) - self.lr * mean / (np.sqrt(square) + self.eps)
        self.comm.all_gather(whole, mine)
        self.x[...] = whole[:n]
