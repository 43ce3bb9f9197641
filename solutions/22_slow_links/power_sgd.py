"""22.2 A matrix as two thin ones.

The gradient of a layer's weights is a matrix, and mostly a few directions are most of it. PowerSGD sends those:

    M_w   [n, m]  rank w's gradient, with what it has left out so far
    P = Σ M_w Q   [n, r]  summed over the ranks; then its columns are made orthonormal
    Q = Σ M_wᵀ P  [m, r]  summed over the ranks; and where the next step begins, so that it goes on searching
    P Qᵀ          [n, m]  on all ranks: what there is of Σ M_w in the directions of P

Both products are linear in M_w. So the sum of the ranks' thin matrices is the thin matrix of the sum, an all-reduce can
sum on the way, and N ranks find what one would find that had all samples.
"""

import numpy as np


def numbers(shape, rank):
    """How many numbers a rank hands to all-reduces for a gradient of this shape, a tuple of ints, with r = rank.

    More than two axes are taken as a matrix of the first by all others. Sent as it is, is what has fewer axes than two,
    and what would not become smaller.
    """
    # begin with n and m of (5, 2, 3), and with what P and Q have together
    whole = int(np.prod(shape))
    return min(whole, rank * (shape[0] + whole // shape[0])) if len(shape) > 1 else whole


class PowerSGD:
    """Sums gradients of one matrix over the ranks.

    comm  the Communicator: comm.all_reduce(x) sums in place; x is in one piece
    q     [m, r] float64, the same on all ranks: the first step's Q. It stays as it is. r < n, r < m
    """

    def __init__(self, comm, q):
        self.comm, self.q = comm, q
        self.left_out = 0.0

    def sum(self, grad):
        """[n, m] float64, new, the same on all ranks: P Qᵀ. Collective: two all-reduces, of P and of Q.

        grad  [n, m] float64: this rank's, which stays as it is, and which the caller writes into again before the next
              call. It may have a lower rank than r, and be nothing but zeros: np.linalg.qr copes with both

        A rank keeps for its next gradient what it has left out: M_w less its own part of P Qᵀ, so that what all ranks
        keep is what P Qᵀ lacks of Σ M_w. How it is divided among them doesn't matter.
        """
        # begin with M_w, and the two all-reduces. What of M_w lies in the directions of P? Its own Qᵀ says so, before
        # the sum
        matrix = grad + self.left_out
        p = matrix @ self.q
        self.comm.all_reduce(p)
        p = np.linalg.qr(p)[0]
        q = matrix.T @ p
        self.left_out = matrix - p @ q.T
        self.comm.all_reduce(q)
        self.q = q
        return p @ q.T
