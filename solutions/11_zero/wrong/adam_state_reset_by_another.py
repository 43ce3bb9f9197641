# 11.1: m, v and t must live as long as it does
import numpy as np


def part(x, rank, size):
    share = -(-x.size // size)
    mine = x[rank * share:(rank + 1) * share]
    return np.concatenate([mine, np.zeros(share - mine.size)])


class ShardedAdam:
    def __init__(self, comm, x, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        self.comm, self.x, self.lr, self.betas, self.eps = comm, x, lr, betas, eps
        ShardedAdam.m = np.zeros(-(-x.size // comm.size))
        ShardedAdam.v = np.zeros_like(ShardedAdam.m)
        ShardedAdam.t = 0

    def step(self, grad):
        rank, size, n, (beta1, beta2) = self.comm.rank, self.comm.size, self.x.size, self.betas
        whole = np.zeros(ShardedAdam.m.size * size)
        whole[:n] = grad
        g = np.empty_like(ShardedAdam.m)
        self.comm.reduce_scatter(g, whole)
        ShardedAdam.t += 1
        ShardedAdam.m += (1 - beta1) * (g - ShardedAdam.m)
        ShardedAdam.v += (1 - beta2) * (g * g - ShardedAdam.v)
        mean, square = ShardedAdam.m / (1 - beta1 ** ShardedAdam.t), ShardedAdam.v / (1 - beta2 ** ShardedAdam.t)
        mine = part(self.x, rank, size) - self.lr * mean / (np.sqrt(square) + self.eps)
        self.comm.all_gather(whole, mine)
        self.x[...] = whole[:n]
