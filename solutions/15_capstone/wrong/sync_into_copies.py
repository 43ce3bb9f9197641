# 15.1: every rank has still its own gradients: write into the arrays themselves
def pieces(Adam, softmax_cross_entropy, ring_all_reduce, average_gradients, shard):
    def gradient_sync(comm, grads, count, total):
        average_gradients(comm, [grad * total / max(count, 1) for grad in grads], count)

    return {"optimizer": Adam, "loss": softmax_cross_entropy, "collective": ring_all_reduce, "sampler": shard,
            "gradient_sync": gradient_sync}
