# 08.1: two calls with the same arguments give different samples
import numpy as np


def shard(n, batch_size, rank, size, seed, epoch):
    order = np.random.permutation(n)
    batches = [order[start:start + batch_size] for start in range(0, n, batch_size)]
    return [batch[rank::size] for batch in batches]
