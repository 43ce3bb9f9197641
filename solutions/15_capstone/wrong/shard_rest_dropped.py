# 15.1: ValueError: parts left batch 2 of epoch 0 without a sample on any rank
import numpy as np


def Wrong(n, batch_size, rank, size, seed, epoch):
    order = np.random.default_rng([seed, epoch]).permutation(n)
    batches = [order[start:start + batch_size] for start in range(0, n, batch_size)]
    return [batch[rank * (len(batch) // size):(rank + 1) * (len(batch) // size)] for batch in batches]


def pieces(Adam, softmax_cross_entropy, ring_all_reduce, average_gradients, shard):
    def gradient_sync(comm, grads, count, total):
        for grad in grads:
            grad *= total / max(count, 1)
        average_gradients(comm, grads, count)

    return {"optimizer": Adam, "loss": softmax_cross_entropy, "collective": ring_all_reduce, "sampler": shard,
            "gradient_sync": gradient_sync} | {"sampler": Wrong}
