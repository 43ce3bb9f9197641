"""07.4 Everybody's part on all, however long.

The parts travel round a ring: in every step each rank hands on what it received in the step before. After N-1 steps
everything has been everywhere, every wire was in use all the time, and nobody has sent a part twice.
"""

import numpy as np


def all_gather(comm, x, exchange):
    """A list of N arrays on every rank: entry r is rank r's x.

    comm      the Communicator: comm.rank, comm.size …
    x         array with one axis, of the same dtype on all ranks, but of another length on each (0 is a length); nobody
              knows those of the others
    exchange  yours, of 07.1: exchange(comm, outgoing, dst, incoming, src)

    A rank sends no part more than once, and in numbers of parts: N-1. What it takes to agree on the lengths comes on
    top, one number per message.
    """
    raise NotImplementedError("begin with the ring: whom do I send to, from whom do I receive, and whose part is it "
                              "that arrives in step s? An array can be received only by one of the same length, so "
                              "the length goes ahead")
