# 15.1: the factor is the first call's for ever
def pieces(Adam, softmax_cross_entropy, ring_all_reduce, average_gradients, shard):
    factor = None

    def gradient_sync(comm, grads, count, total):
        nonlocal factor
        if factor is None:
            factor = total / max(count, 1)
        for g in grads:
            g *= factor
        average_gradients(comm, grads, count)

    return {"optimizer": Adam, "loss": softmax_cross_entropy, "collective": ring_all_reduce, "sampler": shard,
            "gradient_sync": gradient_sync}
