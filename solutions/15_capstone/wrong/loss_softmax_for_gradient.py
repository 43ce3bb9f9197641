# 15.1: with your loss (05.2) alone, and the library's pieces for all else, the curve leaves the library's at step 2
import numpy as np


def Wrong(logits, labels):
    rows = np.arange(len(labels))
    shifted = logits - logits.max(axis=1, keepdims=True)
    exps = np.exp(shifted)
    sums = exps.sum(axis=1, keepdims=True)
    p = exps / sums
    losses = np.log(sums[:, 0]) - shifted[rows, labels]
    return losses.sum(), p


def pieces(Adam, softmax_cross_entropy, ring_all_reduce, average_gradients, shard):
    def gradient_sync(comm, grads, count, total):
        for grad in grads:
            grad *= total / max(count, 1)
        average_gradients(comm, grads, count)

    return {"optimizer": Adam, "loss": softmax_cross_entropy, "collective": ring_all_reduce, "sampler": shard,
            "gradient_sync": gradient_sync} | {"loss": Wrong}
