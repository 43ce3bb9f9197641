# 15.1: your collective (10.3) doesn't leave the reduction of all ranks' x in x
import numpy as np


def Wrong(comm, x, combine=np.add):
    size, rank = comm.size, comm.rank
    n = x.size // size
    chunks = [x[n * i:n * (i + 1)] for i in range(size)]
    for step in range(2 * (size - 1)):
        leaving, here = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        arrived = np.empty_like(here)
        work = comm.isend(leaving, (rank + 1) % size)
        comm.recv(arrived, (rank - 1) % size)
        work.wait()
        if step < size - 1:
            combine(here, arrived, out=here)
        else:
            here[...] = arrived


def pieces(Adam, softmax_cross_entropy, ring_all_reduce, average_gradients, shard):
    def gradient_sync(comm, grads, count, total):
        for grad in grads:
            grad *= total / max(count, 1)
        average_gradients(comm, grads, count)

    return {"optimizer": Adam, "loss": softmax_cross_entropy, "collective": ring_all_reduce, "sampler": shard,
            "gradient_sync": gradient_sync} | {"collective": Wrong}
