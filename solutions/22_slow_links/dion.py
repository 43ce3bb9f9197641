"""22.5 An optimizer that needs no sum of gradients.

Dion moves a matrix in r directions only, all by the same length. It finds them by one step of power iteration, in the
gradients so far, B; and what a step hasn't taken of B stays, for the next one:

    B = M + G                    [n, m]   the momentum, and the gradient
    P = orthonormal(B Q)         [n, r]   from where the last step's search has ended
    R = Bᵀ P                     [m, r]   so P Rᵀ is what there is of B in the directions of P
    M = B - (1 - mu) P Rᵀ        [n, m]   of that only the part mu stays, of all else everything
    Q = R, its columns of length 1        and p ← p - lr · P Qᵀ

Where G is a sum over the ranks nobody needs G itself. B is only multiplied, so of what is B on all ranks together, each
may have a part B_w, that it never shows anybody.
"""

import numpy as np


def dion_step(comm, p, momentum, grad, q, lr, mu, eps):
    """One step with the sum of all ranks' gradients. Collective: two all-reduces, of n·r and of m·r numbers.

    comm      the Communicator: comm.all_reduce(x) sums in place; x is in one piece
    p         [n, m] float64, the same on all ranks. It is moved in place, and is the same on all ranks afterwards
    momentum  [n, m] float64, this rank's part: the ranks' parts add up to M. Renewed in place, to a part of the new M
    grad      [n, m] float64, this rank's part of the gradient, perhaps zeros. It stays as it is
    q         [m, r] float64, the same on all ranks, r < n, r < m. It stays as it is
    lr, mu, eps   the rate; what is left in M of what a step takes; and what is added to the length of a column of R,
              for if there is no gradient at all R is zeros, and Q is to be zeros then, too

    Returns the new Q, a new array, the same on all ranks. P is as np.linalg.qr makes it, which copes with zeros: its
    column j is that of B Q less what lies in the columns before, of length 1. A column may as well have the other sign:
    then so has Q's, and P Qᵀ is the same.
    """
    # begin with B_w, which momentum may hold from now on. Which of B Q, P, R and Q are sums over the ranks, and which
    # are made of such sums? And what of B_w does this rank's own R take?
    momentum += grad
    basis = momentum @ q
    comm.all_reduce(basis)
    basis = np.linalg.qr(basis)[0]
    found = momentum.T @ basis
    momentum -= (1 - mu) * (basis @ found.T)
    comm.all_reduce(found)
    found /= np.linalg.norm(found, axis=0) + eps
    p -= lr * (basis @ found.T)
    return found
