# 15.1: it needs a function of yours around it


def pieces(Adam, softmax_cross_entropy, ring_all_reduce, average_gradients, shard):
    return {"optimizer": Adam, "loss": softmax_cross_entropy, "collective": ring_all_reduce, "sampler": shard,
            "gradient_sync": average_gradients}
