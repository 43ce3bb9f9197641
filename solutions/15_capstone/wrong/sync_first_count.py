# 15.1: the count is the first call's for ever
def pieces(Adam, softmax_cross_entropy, ring_all_reduce, average_gradients, shard):
    counts = []

    def gradient_sync(comm, grads, count, total):
        counts.append(count)
        count = counts[0]
        for grad in grads:
            grad *= total / max(count, 1)
        average_gradients(comm, grads, count)

    return {"optimizer": Adam, "loss": softmax_cross_entropy, "collective": ring_all_reduce, "sampler": shard,
            "gradient_sync": gradient_sync}
