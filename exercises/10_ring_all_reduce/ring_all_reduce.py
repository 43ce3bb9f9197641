"""10.3 The whole ring.

This function stands on its own feet, because chapter 15 puts it into a real training run: all gradients of all ranks
go through it.
"""

import numpy as np


def ring_all_reduce(comm, x, combine=np.add):
    """x becomes the reduction of all ranks' x, in place and with the same bits on all ranks.

    comm     the Communicator: comm.rank, comm.size, comm.send(x, dst), comm.recv(x, src), comm.isend(x, dst)
    x        array with one axis, of the same length and dtype on all ranks; the length need be no multiple of N, and
             may be less than N
    combine  np.add, np.maximum or np.minimum: combine(a, b, out=a) is a += b for the first of them

    2(N-1) steps. In each a rank sends one chunk to the right, 1/N of the array as nearly as it can be, and receives one
    from the left: 2(N-1)/N times the array in all.
    """
    raise NotImplementedError("begin with your first half (10.2); the second is the same walk with = in place of +")
