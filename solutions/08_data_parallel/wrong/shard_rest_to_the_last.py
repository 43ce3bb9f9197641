# 08.1: the parts are uneven
import numpy as np


def shard(n, batch_size, rank, size, seed, epoch):
    order = np.random.default_rng([seed, epoch]).permutation(n)
    parts = []
    for start in range(0, n, batch_size):
        batch = order[start:start + batch_size]
        each = len(batch) // size
        parts.append(batch[rank * each:(rank + 1) * each if rank < size - 1 else None])
    return parts
