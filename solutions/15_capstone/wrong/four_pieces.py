# 15.1: pieces gave ['collective', 'gradient_sync', 'loss', 'optimizer']; expected a dict with
def pieces(Adam, softmax_cross_entropy, ring_all_reduce, average_gradients, shard):
    return {"optimizer": Adam, "loss": softmax_cross_entropy, "collective": ring_all_reduce,
            "gradient_sync": average_gradients}
