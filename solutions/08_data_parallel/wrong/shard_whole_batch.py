# 08.1: every rank holds the whole batch: nothing is divided
import numpy as np


def shard(n, batch_size, rank, size, seed, epoch):
    order = np.random.default_rng([seed, epoch]).permutation(n)
    return [order[start:start + batch_size] for start in range(0, n, batch_size)]
