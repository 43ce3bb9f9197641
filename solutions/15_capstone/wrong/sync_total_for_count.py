# 15.1: the mean of the ranks' means, which is right only while all hold equally many
def pieces(Adam, softmax_cross_entropy, ring_all_reduce, average_gradients, shard):
    def gradient_sync(comm, grads, count, total):
        for g in grads:
            g *= total / max(count, 1)
        average_gradients(comm, grads, total)

    return {"optimizer": Adam, "loss": softmax_cross_entropy, "collective": ring_all_reduce, "sampler": shard,
            "gradient_sync": gradient_sync}
