# 08.1: one generator for a seed, which draws an order for each epoch up to this one
import numpy as np


def shard(n, batch_size, rank, size, seed, epoch):
    rng = np.random.default_rng(seed)
    for _ in range(epoch + 1):
        order = rng.permutation(n)
    return [batch[rank::size] for batch in np.array_split(order, range(batch_size, n, batch_size))]
