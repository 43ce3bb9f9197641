"""22.1 One bit per number.

A gradient is n numbers of 32 bits or 64. Over a slow link send only their signs, and one number for their size. What
that leaves out is most of it; but it isn't lost if the rank that left it out keeps it, and adds it to its next
gradient. Then nothing is ever missing but what the last step has left out:

    all that was sent  +  what is left out now  =  all gradients

A sum of signs is no sign, so the ranks can't sum on the way, as an all-reduce does: everybody sends to everybody.
"""

import numpy as np


def pack(v):
    """v [n] as (scale, bits).

    bits   uint8 [⌈n / 8⌉]: eight signs in each, as np.packbits makes them; 1 where v ≥ 0
    scale  the number s for which ±s, with these signs, is nearest to v, by the sum of squares
    """
    # begin with the sum of (v - s·sign)²: what is its derivative by s? sign² is 1, and v·sign an old acquaintance
    return np.abs(v).mean(), np.packbits(v >= 0)


def unpack(scale, bits, n):
    """The n numbers, float64, that (scale, bits) stand for. packbits fills the last byte up with zeros."""
    # begin with np.unpackbits, which can be told how many there are
    return np.where(np.unpackbits(bits, count=n), scale, -scale)


class OneBit:
    """Sums gradients over the ranks by their signs.

    comm  the Communicator: comm.rank, comm.size, and comm.all_gather(out, x), by which row r of out becomes rank r's x.
          x is of one dtype and has the same shape on all ranks, out one axis more; both in one piece
    """

    def __init__(self, comm):
        self.comm = comm
        self.left_out = 0.0

    def sum(self, grad):
        """[n] float64, new, with the same bits on all ranks: the sum of what all ranks have sent. Collective.

        grad  [n] float64: this rank's, which stays as it is, and which the caller writes into again before the next
              call. Of one OneBit all have the same n

        What a rank sends is its gradient and what it has left out so far, packed: ⌈n / 8⌉ bytes of signs, and 8 of the
        scale, to each other rank. The bytes of a float are np.array([number]).view(np.uint8), and .view(np.float64) is
        the way back.
        """
        # begin with what is to be sent. What has really been sent of it is known after packing: and what hasn't?
        wanted = grad + self.left_out
        scale, bits = pack(wanted)
        message = np.concatenate([np.array([scale]).view(np.uint8), bits])
        everybodys = np.empty((self.comm.size, len(message)), np.uint8)
        self.comm.all_gather(everybodys, message)
        self.left_out = wanted - unpack(scale, bits, len(grad))
        return sum(unpack(row[:8].view(np.float64), row[8:], len(grad)) for row in everybodys)
