# 15.1: average_gradients is called with all of grads once for each of them
def pieces(Adam, softmax_cross_entropy, ring_all_reduce, average_gradients, shard):
    def gradient_sync(comm, grads, count, total):
        for g in grads:
            g *= total / max(count, 1)
            average_gradients(comm, grads, count)

    return {"optimizer": Adam, "loss": softmax_cross_entropy, "collective": ring_all_reduce, "sampler": shard,
            "gradient_sync": gradient_sync}
