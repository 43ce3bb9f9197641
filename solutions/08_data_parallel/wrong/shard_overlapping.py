# 08.1: the parts overlap: some sample is on two ranks
import numpy as np


def shard(n, batch_size, rank, size, seed, epoch):
    order = np.random.default_rng([seed, epoch]).permutation(n)
    batches = [order[start:start + batch_size] for start in range(0, n, batch_size)]
    return [batch[len(batch) * rank // size:-(-len(batch) * (rank + 1) // size)] for batch in batches]
