"""10.4 When does it pay?

A message of m bytes takes alpha + beta·m seconds: alpha to be on its way at all, beta for every byte. That is enough to
tell which all-reduce is the faster one. (Adding up costs time too; it is left out here.)
"""

import math


def ring_seconds(size, nbytes, alpha, beta):
    """Seconds for an all-reduce of `nbytes` by the ring of 10.3 on `size` ≥ 2 ranks; size divides nbytes."""
    raise NotImplementedError("begin with one step: how many bytes has its message, and how many such steps are there?")


def tree_seconds(size, nbytes, alpha, beta):
    """Seconds for the tree of 07.3, a reduce and a broadcast of the whole array; size need be no power of two."""
    raise NotImplementedError("begin with the number of steps on 4 ranks, and on 5")


def crossover(size, alpha, beta):
    """The number of bytes from which on the ring is faster than the tree, as a float; 0.0 if it always is.

    size         number of ranks, ≥ 2
    alpha, beta  seconds per message, and per byte; both above 0
    """
    raise NotImplementedError("begin with both costs as straight lines over nbytes, and the point where they cross; "
                              "for 2 and 3 ranks, too")
