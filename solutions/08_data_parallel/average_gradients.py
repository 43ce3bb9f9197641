"""08.3 The gradient of the global batch.

Each rank has the mean gradient over its own samples. What the optimizer needs is the mean over all samples of all
ranks: not the sum of the ranks' means, and not the mean of their means unless all have equally many samples.
"""

import numpy as np


def average_gradients(comm, grads, count):
    """Each gradient becomes the mean over the samples of all ranks, in place and alike on all ranks.

    comm   the Communicator; comm.all_reduce(x) makes x the sum of all ranks' x, in place
    grads  list of float64 arrays: means over this rank's samples; of the same shapes on all ranks
    count  how many samples this rank had, ≥ 0; another number on each rank, but not 0 on all
    """
    # begin with the denominator: how many samples do all ranks hold together? A number is sent as np.array([…])
    total = np.array([float(count)])
    comm.all_reduce(total)
    for grad in grads:
        grad *= count / total[0]
        comm.all_reduce(grad)
