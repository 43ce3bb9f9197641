# 15.1: objects in place of functions, and a class made from Adam
def pieces(Adam, softmax_cross_entropy, ring_all_reduce, average_gradients, shard):
    class Sync:
        def __call__(self, comm, grads, count, total):
            if count:
                for g in grads:
                    g *= total / count
            average_gradients(comm, grads, count)
    gradient_sync = Sync()
    class Mine(Adam):
        pass
    Adam = Mine

    return {"optimizer": Adam, "loss": softmax_cross_entropy, "collective": ring_all_reduce, "sampler": shard,
            "gradient_sync": gradient_sync}
