# 15.1: only the first of grads is turned into means
def pieces(Adam, softmax_cross_entropy, ring_all_reduce, average_gradients, shard):
    def gradient_sync(comm, grads, count, total):
        grads[0] *= total / max(count, 1)
        average_gradients(comm, grads, count)

    return {"optimizer": Adam, "loss": softmax_cross_entropy, "collective": ring_all_reduce, "sampler": shard,
            "gradient_sync": gradient_sync}
