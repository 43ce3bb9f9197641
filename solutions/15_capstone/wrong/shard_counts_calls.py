# 15.1: asked twice for one epoch, it gives two orders
def pieces(Adam, softmax_cross_entropy, ring_all_reduce, average_gradients, shard):
    calls = [0]

    def sampler(n, batch_size, rank, size, seed, epoch):
        calls[0] += 1
        return shard(n, batch_size, rank, size, seed, calls[0])
    def gradient_sync(comm, grads, count, total):
        for grad in grads:
            grad *= total / max(count, 1)
        average_gradients(comm, grads, count)

    return {"optimizer": Adam, "loss": softmax_cross_entropy, "collective": ring_all_reduce, "sampler": shard,
            "gradient_sync": gradient_sync} | {"sampler": sampler}
