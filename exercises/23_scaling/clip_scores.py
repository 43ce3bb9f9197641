"""23.5 Scores that grow.

A score of attention, q·k/√size, is a product of two things that both grow while a net is trained. Where scores are
large, softmax looks at one position alone, and its gradient is nearly 0: such a head hardly learns any more where else
to look, and on the way there the loss jumps. Large runs look after each step at the greatest score s of each head,
among all that the global batch had, and where it is above a threshold τ they make the head's weights smaller:

    γ = τ / s        with the same x its scores are then γ times what they were: τ at most

Queries and keys share γ, √γ each, unless several heads have a key in common: then it stays, for the others' sake.
"""

import numpy as np


def clip_scores(comm, x, w_q, w_k, heads, threshold):
    """(w_q, w_k, s): the weights after the clip, and the greatest scores before it, float64 (heads,).

    comm       comm.all_reduce(a, "max") leaves in a, on all ranks, the greatest of what they have, element by element
    x          (samples, time, dim): this rank's part of the batch, in which there may be no sample
    w_q        (dim, heads·size): x @ w_q has head 0's queries in its first `size` columns, then head 1's, and so on
    w_k        (dim, kv_heads·size), of the keys likewise; kv_heads divides heads, and the first heads/kv_heads heads
               have the first key, the next ones the second …
    threshold  τ, above 0

    Position t looks at positions 0 to t; what it doesn't look at is no score. Heads whose s isn't above τ stay as they
    are; so do those whose s is inf, which no factor mends. The weights are new arrays of their dtypes. One all-reduce
    of `heads` numbers is all that is sent.
    """
    raise NotImplementedError("begin with the greatest score of each head on this rank. Which number stands for no "
                              "score at all? Who must agree before anybody works out a factor?")
