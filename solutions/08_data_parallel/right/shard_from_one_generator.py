# 08.1: the seed begins a generator, and an epoch is its next order
import numpy as np


def shard(n, batch_size, rank, size, seed, epoch):
    """Part boundaries by multiplication."""
    rng = np.random.default_rng(seed)
    for _ in range(epoch + 1):
        order = rng.permutation(n)
    batches = np.split(order, range(batch_size, n, batch_size))
    return [batch[len(batch) * rank // size:len(batch) * (rank + 1) // size] for batch in batches]
