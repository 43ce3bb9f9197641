# 08.1: samples are left out
import numpy as np


def shard(n, batch_size, rank, size, seed, epoch):
    order = np.random.default_rng([seed, epoch]).permutation(n)
    batches = [order[start:start + batch_size] for start in range(0, n, batch_size)]
    return [batch[rank * (len(batch) // size):(rank + 1) * (len(batch) // size)] for batch in batches]
