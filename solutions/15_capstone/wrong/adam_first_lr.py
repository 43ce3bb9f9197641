# 15.1: It trains with the lr that it was made with for ever
def pieces(Adam, softmax_cross_entropy, ring_all_reduce, average_gradients, shard):
    def gradient_sync(comm, grads, count, total):
        for grad in grads:
            grad *= total / max(count, 1)
        average_gradients(comm, grads, count)

    class Optimizer:
        def __init__(self, parameters, **options):
            self.inner = Adam(parameters, **options)

        def step(self, grads, lr=None):
            self.inner.step(grads)

    return {"optimizer": Adam, "loss": softmax_cross_entropy, "collective": ring_all_reduce, "sampler": shard,
            "gradient_sync": gradient_sync} | {"optimizer": Optimizer}
