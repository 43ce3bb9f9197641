"""11.3 One norm of many parts.

Clipping scales a gradient that is too long: to a length of max_norm, all parameters by one factor. When each rank has a
part of it, nobody can see how long it is.
"""

import numpy as np


def clip(comm, parts, sizes, max_norm):
    """Scale the gradient, in place, so that its 2-norm is at most max_norm. Returns the norm before.

    comm      the Communicator: comm.all_reduce(x) makes the array x the sum of all ranks' x, in place
    parts     list of flat float64 arrays: this rank's part of each unit's gradient, summed over the ranks already. All
              parts of all units and ranks together are the gradient
    sizes     how many elements of each part are the gradient's: what lies behind them is padding, and may be anything.
              A rank may have 0 of a unit, or of all
    max_norm  a gradient that isn't longer stays as it is

    The norm is a number, the same on all ranks. One message makes it known, of one number from each rank.
    """
    # begin with what can be added up over parts and over ranks: not the norms
    squares = np.array([sum(float(np.sum(p[:n] ** 2)) for p, n in zip(parts, sizes, strict=True))])
    comm.all_reduce(squares)
    norm = float(np.sqrt(squares.item()))
    if norm > max_norm:
        for p, n in zip(parts, sizes, strict=True):
            p[:n] *= max_norm / norm
    return norm
