# 08.1: and the last one what remains
import numpy as np


def shard(n, batch_size, rank, size, seed, epoch):
    order = np.random.default_rng([seed, epoch]).permutation(n)
    batches = [order[start:start + batch_size] for start in range(0, n, batch_size)]
    batches = [batches[i] for i in np.random.default_rng([seed, epoch, 1]).permutation(len(batches))]
    return [batch[rank::size] for batch in batches]
