# 15.1: but not all of them go through average_gradients
import numpy as np


def pieces(Adam, softmax_cross_entropy, ring_all_reduce, average_gradients, shard):
    def gradient_sync(comm, grads, count, total):
        average_gradients(comm, [np.ones(1)], count)
        for grad in grads:
            comm.all_reduce(grad)

    return {"optimizer": Adam, "loss": softmax_cross_entropy, "collective": ring_all_reduce, "sampler": shard,
            "gradient_sync": gradient_sync}
