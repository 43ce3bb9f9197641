"""16.1 Layouts as data.

An array that N ranks share is one global array and a word for how it lies on them, its placement:

    "R"            replicated: every rank has all of it
    "S0", "S1" …   split along axis 0, 1 …: of n elements along it rank r has those from n·r//N up to n·(r+1)//N,
                   without the latter. Some ranks may have one more than others, or none
    "P"            partial: every rank has an addend of the global array's shape; the array is their sum

No message is sent yet: `size` ranks are a list of `size` arrays.
"""

import numpy as np


def cut(x, placement, size):
    """The parts of a global array x on so many ranks: a list of `size` arrays, each of x's dtype.

    Of the many ways to be partial it takes the cheapest: rank 0 has x, all others zeros. They may be views of x.
    """
    raise NotImplementedError("begin with \"R\" and \"P\", which need no axis. For \"S…\": int(placement[1:]) is the "
                              "axis, and its length need not be a multiple of size")


def join(parts, placement):
    """The global array of which the ranks hold these parts, and of their dtype; for "P" the parts are any addends."""
    raise NotImplementedError("begin with the question what one rank's part says of the whole, for each of the three "
                              "kinds")


def product(x, w):
    """How X·W lies on the ranks if each multiplies its part of X [n, k] by its part of W [k, m], and sends nothing.

    x, w  the placements of X and W: "R", "S0", "S1" or "P"

    Returns "R", "S0", "S1" or "P"; None if what the ranks get isn't X·W in any of these layouts (whatever the addends
    of a "P" are), or if the parts can't be multiplied at all.
    """
    raise NotImplementedError("begin with the dimensions: X has n and k, W has k and m, the product has n and m. "
                              "Which dimension does each split touch, and is it in the product?")


def move(have, want, nbytes, size):
    """What brings an array from one layout into another: (its name, how many bytes each rank sends).

    have    "R", "S0", "S1" or "P"
    want    "R", "S0" or "S1"
    nbytes  of the global array; size divides both of its dimensions

    The name is "nothing", "slice" (each rank drops what it needn't have), "all_gather", "reduce_scatter", "all_to_all"
    or "all_reduce", whichever sends least. An all-reduce is the ring's, a reduce-scatter and then an all-gather; what
    a rank keeps for itself isn't sent.
    """
    raise NotImplementedError("begin with the rows of a table: four layouts that one can have, three that one can "
                              "want, and what each rank lacks")
