# 11.1: moments in place, powers of the betas kept, only what is no padding is stepped
import numpy as np


def part(x, rank, size):
    share = (x.size + size - 1) // size
    out = np.zeros(share)
    for i in range(share):
        if rank * share + i < len(x):
            out[i] = x[rank * share + i]
    return out


class ShardedAdam:
    def __init__(self, comm, x, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        self.comm, self.x, self.lr, self.betas, self.eps = comm, x, lr, betas, eps
        self.state = {name: part(np.zeros_like(x), comm.rank, comm.size) for name in "mv"}
        self.powers = [1.0, 1.0]

    def step(self, grad):
        comm, (b1, b2), s = self.comm, self.betas, self.state
        share = s["m"].size
        sent = np.pad(grad, (0, share * comm.size - grad.size))
        mine = np.empty(share)
        comm.reduce_scatter(mine, sent)
        self.powers = [self.powers[0] * b1, self.powers[1] * b2]
        s["m"] *= b1
        s["m"] += (1 - b1) * mine
        s["v"] *= b2
        s["v"] += (1 - b2) * np.square(mine)
        scale = np.sqrt(1 - self.powers[1])
        delta = self.lr / (1 - self.powers[0]) * s["m"] / (np.sqrt(s["v"]) / scale + self.eps)
        start = comm.rank * share
        stop = min(start + share, self.x.size)
        if stop > start:
            self.x[start:stop] -= delta[:stop - start]
        new = np.empty(share * comm.size)
        comm.all_gather(new, part(self.x, comm.rank, comm.size))
        np.copyto(self.x, new[:self.x.size])
