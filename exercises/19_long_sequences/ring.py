"""19.3 Attention in a ring.

Each rank has some positions of the sequence: their queries, keys and values. The queries stay; keys and values go
round, to the next rank in every step, until everybody has met all of them. What a rank works with is on its way to the
next one meanwhile.

    step      0            1            2
    rank 0    q₀ · k₀v₀    q₀ · k₂v₂    q₀ · k₁v₁
    rank 1    q₁ · k₁v₁    q₁ · k₀v₀    q₁ · k₂v₂
    rank 2    q₂ · k₂v₂    q₂ · k₁v₁    q₂ · k₀v₀
"""

import numpy as np


class RingAttention:
    """Causal attention of a sequence of which each rank has a part.

    comm       the Communicator: comm.rank, comm.size, comm.isend(x, dst) and comm.irecv(x, src), which only post a
               message and return a work (work.wait(): x has been sent, or has arrived); comm.send and comm.recv wait.
               An array that is sent lies in memory in one piece (np.ascontiguousarray)
    at         [integers [time] for each rank]: the positions of rank 0, of rank 1 …, as many for each, in any order
    attention, attention_backward   yours, of 19.1 and 19.2
    """

    def __init__(self, comm, at, attention, attention_backward):
        self.comm, self.at = comm, at
        self.attention, self.attention_backward = attention, attention_backward

    def forward(self, q, k, v):
        """(out [heads, time, width] of this rank's queries, what backward will need of this pass).

        q, k  [heads, time, size], v [heads, time, width]: of this rank's positions; as large on all ranks

        A rank sends to one neighbour only. It sends keys and values N-1 times, and computes while they travel.
        """
        raise NotImplementedError("begin with the step: whose keys are here in step s? And what of the step must be "
                                  "posted before the attention to them, and waited for after it?")

    def backward(self, kept, dout):
        """(dq, dk, dv): the gradients by this rank's q, k and v, of all ranks' losses.

        kept  what forward gave beside out. Several forwards may be under way
        dout  [heads, time, width]: the gradient by out

        The gradients by keys and values travel with them, and every rank adds its part, until they are home. A rank
        sends keys, values and their gradients at most N times.
        """
        raise NotImplementedError("begin with the way of one rank's gradients: who adds to them first, who last, and "
                                  "where are they then?")
