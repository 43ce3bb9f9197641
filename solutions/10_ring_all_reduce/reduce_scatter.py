"""10.2 First half: every rank completes one chunk.

N-1 steps, each of them N messages at the same time, one from every rank to its right neighbour.
"""

import numpy as np


def chunks(x, size):
    """x cut into `size` views of it, as even as possible; some are empty where x is short."""
    return [x[x.size * i // size:x.size * (i + 1) // size] for i in range(size)]


def reduce_scatter(comm, x, table, exchange):
    """Chunk rank + 1 of x becomes the sum of all ranks' chunks of that number, in place; of the last rank, chunk 0.

    comm      the Communicator: comm.rank, comm.size …
    x         array with one axis, of the same length and dtype on all ranks; the length may be anything. What the other
              chunks hold afterwards doesn't matter
    table     yours, of 10.1: table(rank, size)
    exchange  yours, of 07.1: exchange(comm, outgoing, dst, incoming, src)

    Each rank sends N-1 messages, of one chunk each.
    """
    # begin with the chunks as views: what is added to a view is added to x. What arrives needs an array of its own
    parts = chunks(x, comm.size)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for send, receive in table(comm.rank, comm.size)[:comm.size - 1]:
        arrived = np.empty_like(parts[receive])
        exchange(comm, parts[send], right, arrived, left)
        parts[receive] += arrived
