"""08.1 Which samples are mine?

Every rank trains on its own part of each global batch. Nobody sends indices around: every rank works out the same
order from the same numbers, and takes its part.
"""

import numpy as np


def shard(n, batch_size, rank, size, seed, epoch):
    """The samples of rank `rank`, one of `size`, in each global batch of the epoch.

    n            number of samples in the data set
    batch_size   samples per global batch, all ranks together; the last one has what remains
    rank, size   who asks, and how many ranks there are
    seed, epoch  numbers; they alone decide on the order, and each pair of them on an order of its own

    Returns a list with an int array per global batch. In each batch the parts of all ranks are disjoint and together
    hold every sample of it; they differ by at most one sample in length (a part may be empty). Over the epoch every
    sample comes once. The batches are the same ones whatever the number of ranks.
    """
    raise NotImplementedError("begin with an order of 0 … n-1 that all ranks agree on: np.random.default_rng takes a "
                              "list of numbers as its seed")
