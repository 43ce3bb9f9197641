"""10.1 Which chunk goes, which one comes?

An array is cut into N chunks, 0 to N-1. In every step each rank sends one chunk to its right neighbour and receives one
from its left. In the first half what arrives is added to what is there, in the second half it overwrites. This is the
plan: no message is sent yet.
"""


def table(rank, size):
    """The plan of one rank: a list of pairs (send, receive), numbers of chunks, one pair per step.

    rank, size   who asks, and how many ranks there are. Rank r sends to rank r + 1 and receives from rank r - 1; the
                 last one's right neighbour is rank 0

    In step 0 rank r sends chunk r. Steps 0 to N-2 are the first half: every chunk travels past all ranks and collects
    each one's part. Steps N-1 to 2N-3 are the second half: every chunk, complete now, travels past all ranks again.
    """
    # begin with N = 3 on paper: what arrives in one step is what goes on to the right in the next. In which step is a
    # chunk complete, and on which rank?
    return [((rank - step) % size, (rank - step - 1) % size) for step in range(2 * (size - 1))]
