"""09.2 Post early, wait late.

Backward tells the reducer of each gradient as soon as it is complete. When all of a bucket are there, the bucket is on
its way, while backward goes on with the layers before. Only at the end somebody waits.
"""

import numpy as np


class Reducer:
    """Sums gradients over the ranks, bucket by bucket, for any number of backward passes.

    comm     the Communicator. comm.all_reduce(x, async_op=True) posts the sum of all ranks' x into x and returns at
             once; what it returns has wait(), and x may not be touched before that
    buckets  lists of parameter numbers, from cut_into_buckets; the same on all ranks
    grads    list of arrays, one per parameter; backward writes this rank's gradients there. They have one dtype,
             and travel in it

    Each pass: backward calls ready(i) for every parameter that it used, in an order that may differ from rank to rank;
    then finish(). Of a parameter that it hasn't used, grads[i] holds zeros.
    """

    def __init__(self, comm, buckets, grads):
        self.comm, self.buckets, self.grads = comm, buckets, grads
        raise NotImplementedError("begin with what has to be known between two calls: what is still missing in each "
                                  "bucket, how many buckets are on their way (all ranks must post them in one order: "
                                  "0, 1, 2, …), and what was posted")

    def ready(self, i):
        """grads[i] is complete in this pass. Posts what can be posted, and never waits."""
        raise NotImplementedError("begin with striking i off; then post every bucket whose turn it is and that misses"
                                  " nothing")

    def finish(self):
        """The pass is over: every array of grads becomes the sum over all ranks, in place. Ready for the next pass."""
        raise NotImplementedError("begin with the buckets that are still at home: some parameter of theirs wasn't "
                                  "used on this rank, but perhaps on another")
