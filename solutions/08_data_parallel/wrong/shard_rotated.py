# 08.1: the order comes back
import numpy as np


def shard(n, batch_size, rank, size, seed, epoch):
    order = np.random.default_rng(seed).permutation(n)
    order = np.roll(order, epoch)
    batches = [order[start:start + batch_size] for start in range(0, n, batch_size)]
    return [batch[rank::size] for batch in batches]
