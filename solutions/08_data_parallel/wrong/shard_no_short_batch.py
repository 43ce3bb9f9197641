# 08.1: the result isn't a list of 1 int arrays
import numpy as np


def shard(n, batch_size, rank, size, seed, epoch):
    order = np.random.default_rng([seed, epoch]).permutation(n)
    batches = [order[start:start + batch_size] for start in range(0, n, batch_size)] if n > batch_size else []
    return [batch[rank::size] for batch in batches]
