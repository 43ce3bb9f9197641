# 15.1: of a rank without samples, total / count is no number
import numpy as np


def pieces(Adam, softmax_cross_entropy, ring_all_reduce, average_gradients, shard):
    def gradient_sync(comm, grads, count, total):
        for g in grads:
            g *= np.float64(total) / count
        average_gradients(comm, grads, count)

    return {"optimizer": Adam, "loss": softmax_cross_entropy, "collective": ring_all_reduce, "sampler": shard,
            "gradient_sync": gradient_sync}
