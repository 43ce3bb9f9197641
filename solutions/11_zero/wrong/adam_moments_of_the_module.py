# 11.1: m and v go on where another optimizer has stopped
"""11.1 An optimizer that remembers 1/N.

In data parallelism all ranks hold the same two moments, and work out the same step. ZeRO's first stage: each rank steps
its own part of the parameters, has moments for that part alone, and the stepped parts are then collected.

    x        |--- rank 0 ---|--- rank 1 ---|--- rank 2 -|pad|     share = n / N, rounded up: all parts are equally long
"""

import numpy as np

MOMENTS = {}


def part(x, rank, size):
    """The rank's part of the flat array x, a new array of `share` elements; zeros where x has no more.

    Of 4 elements on 3 ranks share is 2: [x0, x1], [x2, x3], [0, 0].
    """
    # begin with share: a division that is rounded up
    share = -(-x.size // size)
    mine = x[rank * share:(rank + 1) * share]
    return np.concatenate([mine, np.zeros(share - mine.size)])


class ShardedAdam:
    """Adam (chapter 5, without weight decay) with its state cut over the ranks.

    m ← β₁m + (1−β₁)g,  v ← β₂v + (1−β₂)g²,  x ← x − lr · m̂ / (√v̂ + eps),  m̂ = m / (1−β₁ᵗ),  v̂ = v / (1−β₂ᵗ)

    comm  the Communicator: comm.rank, comm.size;
          comm.reduce_scatter(out, y): out becomes this rank's N-th of the sum of all ranks' y, y.size = N · out.size;
          comm.all_gather(out, y): out becomes all ranks' y, one after the other, out.size = N · y.size
    x     flat array of n float64 parameters, the same on all ranks; every step is written into this very array. n need
          not be a multiple of N, and may be smaller

    Between two steps a rank keeps its two moments, of `share` elements each, and no array as long as x beside x.
    """

    def __init__(self, comm, x, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        self.comm, self.x, self.lr, self.betas, self.eps = comm, x, lr, betas, eps
        # begin with what has to be remembered from step to step, and for how many elements
        share = -(-x.size // comm.size)
        self.m, self.v = MOMENTS.setdefault(share, (np.zeros(share), np.zeros(share)))
        self.t = 0

    def step(self, grad):
        """One step, after which all of x is new, and the same on all ranks.

        grad  flat array of n: this rank's gradient. The SUM over the ranks is that of the global batch. It stays as it
              is
        """
        # begin with the sum of this rank's part of the gradients: reduce_scatter wants N · share elements;
        # then step this rank's part, and collect all parts
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
