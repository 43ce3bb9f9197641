# 15.1: every rank says 1, and the shares are ranks times as large
def pieces(Adam, softmax_cross_entropy, ring_all_reduce, average_gradients, shard):
    def gradient_sync(comm, grads, count, total):
        for g in grads:
            g *= comm.size
        average_gradients(comm, grads, 1)

    return {"optimizer": Adam, "loss": softmax_cross_entropy, "collective": ring_all_reduce, "sampler": shard,
            "gradient_sync": gradient_sync}
