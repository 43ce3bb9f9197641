"""19.4 Zigzag: as much work for everybody.

With positions in order the last rank sees all, the first one only itself: in a ring all wait for the one that has most
to do. So cut the sequence into 2N equal parts, and give each rank an early and a late one:

    position   0  1  2  3  4  5  6  7  8  9 10 11
    in order   0  0  0  0  1  1  1  1  2  2  2  2      the rank that has it
    zigzag     0  0  1  1  2  2  2  2  1  1  0  0

The ring of 19.3 stays as it is. It is told other positions, and in place of attention one that leaves out what nobody
sees: of the four products of halves, own queries' and arriving keys', mostly two.
"""

import numpy as np


def positions(time, rank, size):
    """The positions that a rank has, in their order: integers [time / size].

    time  of the whole sequence, positions 0 … time - 1. ValueError, with both numbers in its text, unless it is a
          multiple of 2·size

    Of 2·size equal parts rank r has part r and part 2·size - 1 - r.
    """
    raise NotImplementedError("begin with the length of a part, and with where the rank's two parts begin")


def products(q_at, k_at):
    """Which halves are to be multiplied: [(i, j)], queries' half i by keys' half j, 0 the first and 1 the second.

    q_at, k_at  integers: positions, of an even number each (not always the same); they rise within a half

    A product is left out if none of its queries sees any of its keys.
    """
    raise NotImplementedError("begin with two halves: which query sees most, and which key is seen by most?")


def by_halves(q, k, v, q_at, k_at, before, attention):
    """attention(q, k, v, q_at, k_at, before), as in 19.1, but of the needed products only: (out, lse).

    before     None, or the (out, lse) of other keys; stays as it is
    attention  yours, of 19.1: called once for each needed product, with these halves
    """
    raise NotImplementedError("begin with the result as it is before any product: `before`, or what a query has that "
                              "has seen nothing. It isn't yours to change")


def backward_by_halves(q, k, v, q_at, k_at, out, lse, dout, attention_backward):
    """attention_backward(q, k, v, q_at, k_at, out, lse, dout), as in 19.2, of the needed products: (dq, dk, dv).

    attention_backward  yours, of 19.2
    """
    raise NotImplementedError("begin with three arrays of zeros: into which rows of each does a product's part go?")
