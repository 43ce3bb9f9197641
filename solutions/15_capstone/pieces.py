"""15.1 All your pieces, in one training run.

The library's training program has five places where a piece of the course fits. Four of yours can go in as they are.
The fifth speaks another language: your average_gradients wants means over the rank's own samples, and the library
hands out something else.
"""


def pieces(Adam, softmax_cross_entropy, ring_all_reduce, average_gradients, shard):
    """What goes where: a dict with a piece for each of five places.

    Arguments: your answers of 05.4, 05.2, 10.3, 08.3 and 08.1, or ours where you have none that passed.

    The places, and what is called there:

    "optimizer"      Adam(parameters, lr=…, weight_decay=…, decoupled=…), then .step(grads, lr=…) in every step
    "loss"           loss(logits, labels) -> (sum, gradient of the sum)
    "collective"     all_reduce(comm, x, combine): every reduction of the run goes through it
    "sampler"        shard(n, batch_size, rank, size, seed, epoch) -> an index array per global batch
    "gradient_sync"  sync(comm, grads, count, total), which has average_gradients do the averaging, with
                         comm   the Communicator; comm.all_reduce goes through your "collective"
                         grads  list of arrays, to be changed in place: this rank's gradients, SUMMED over its samples
                                and divided by the number of samples of ALL ranks
                         count  this rank's samples, ≥ 0
                         total  the samples of all ranks, ≥ 1
                     Afterwards grads are the mean over all samples of all ranks, alike on every rank.
    """
    # begin with the four that fit as they are. For gradient_sync, write a function inside this one: by what must grads
    # be multiplied, to be the means over `count` samples that average_gradients wants? And if count is 0?
    def gradient_sync(comm, grads, count, total):
        for grad in grads:
            grad *= total / max(count, 1)
        average_gradients(comm, grads, count)

    return {"optimizer": Adam, "loss": softmax_cross_entropy, "collective": ring_all_reduce, "sampler": shard,
            "gradient_sync": gradient_sync}
