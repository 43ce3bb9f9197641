# 08.1: and the last one what remains
import numpy as np


def shard(n, batch_size, rank, size, seed, epoch):
    order = np.random.default_rng([seed, epoch]).permutation(n)
    starts = range(n % batch_size or batch_size, n, batch_size)
    batches = np.split(order, starts)
    return [batch[rank::size] for batch in batches]
