# 15.1: all gradients in one array
import numpy as np


def pieces(Adam, softmax_cross_entropy, ring_all_reduce, average_gradients, shard):
    def gradient_sync(comm, grads, count, total):
        flat = np.concatenate([g.ravel() for g in grads]) * (total / count if count else 0.0)
        average_gradients(comm, [flat], count)
        at = 0
        for g in grads:
            g[...] = flat[at:at + g.size].reshape(g.shape)
            at += g.size

    return {"optimizer": Adam, "loss": softmax_cross_entropy, "collective": ring_all_reduce, "sampler": shard,
            "gradient_sync": gradient_sync}
