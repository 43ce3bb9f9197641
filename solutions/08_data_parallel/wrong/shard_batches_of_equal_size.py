# 08.1: and the last one what remains
import numpy as np


def shard(n, batch_size, rank, size, seed, epoch):
    order = np.random.default_rng([seed, epoch]).permutation(n)
    batches = np.array_split(order, -(-n // batch_size))
    return [batch[rank::size] for batch in batches]
