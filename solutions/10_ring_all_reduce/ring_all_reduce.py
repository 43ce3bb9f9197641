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
    # begin with your first half (10.2); the second is the same walk with = in place of +
    size, rank = comm.size, comm.rank
    chunks = [x[x.size * i // size:x.size * (i + 1) // size] for i in range(size)]
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
