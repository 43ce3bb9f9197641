"""20.3 Tokens travel to the experts and back.

The N ranks of a communicator `ep` have different tokens, and different experts: of E, rank r has those from r·E/N up to
(r+1)·E/N. Each rank routes its own tokens. Then its rows, `capacity` for each of all E experts, are sent to where the
experts are, and the answers come back.

    rank 0   rows for experts 0 1 2 3 ─┐               ┌─ experts 0 1: rows of rank 0, rows of rank 1
                                       ├─ all-to-all ──┤
    rank 1   rows for experts 0 1 2 3 ─┘               └─ experts 2 3: rows of rank 0, rows of rank 1

The capacity is the same on all ranks, whatever their tokens choose. So nobody need be told how much will come.
"""

import numpy as np


def experts_forward(x, up, down):
    """([experts, rows, size]: each expert's answers; what experts_backward needs). x: each one's rows, as large; up
    [experts, size, hidden], down [experts, hidden, size]. A row of zeros has an answer of zeros."""
    z = x @ up
    t = np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z ** 3))
    h = 0.5 * z * (1 + t)
    return h @ down, (x, up, down, z, t, h)


def experts_backward(kept, dy):
    """(the gradient by x, by up, by down)."""
    x, up, down, z, t, h = kept
    slope = 0.5 * (1 + t) + 0.5 * z * (1 - t ** 2) * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * z ** 2)
    dz = dy @ down.transpose(0, 2, 1) * slope
    return dz @ up.transpose(0, 2, 1), x.transpose(0, 2, 1) @ dz, h.transpose(0, 2, 1) @ dy


def to_experts(comm, rows):
    """[E / N, N · capacity, size]: for each of this rank's experts all ranks' rows, rank 0's first, then rank 1's …

    rows  [E, capacity, size]: this rank's, for all experts. Not to be changed. Their dtype stays

    One message: comm.all_to_all(out, x) cuts x along its first axis into N equal parts, and part j goes to rank j; in
    out, part i has come from rank i. Both are arrays in one piece (np.ascontiguousarray), of one shape and dtype.
    """
    raise NotImplementedError("begin with the parts: which experts' rows are part j of x? Then with what has arrived:"
                              " its first axis is where from, and then which expert; and wanted is the reverse")


def to_tokens(comm, rows):
    """The way back: [E, capacity, size], for all experts the rows that belong to this rank's tokens.

    rows  [E / N, N · capacity, size]: of this rank's experts, laid out as to_experts leaves them. Not to be changed;
          their dtype stays
    """
    raise NotImplementedError("begin with to_experts, read from its last line to its first")


class ExpertParallel:
    """A layer of E experts: y = Σ gate · expert(x), over each token's choices that have found a place; 0 if none has.

    comm      the Communicator of the ranks that share the experts
    params    {"router": [size, E], the same on all ranks; "up": [E/N, size, hidden], "down": [E/N, hidden, size]: this
              rank's experts}. An optimizer will change these arrays in place, between passes
    k, capacity   as in 20.1, the same on all ranks
    pieces    yours: {"route", "rows_of", "route_backward" (20.1), "balance_loss" (20.2)}, functions
    """

    def __init__(self, comm, params, k, capacity, pieces):
        self.comm, self.params, self.k, self.capacity, self.pieces = comm, params, k, capacity, pieces

    def forward(self, x):
        """(y [tokens, size]; balance loss of this rank's tokens; what backward will need of this pass).

        x  [tokens, size]: this rank's. Ranks may have different numbers of tokens, or none
        """
        raise NotImplementedError("begin with the logits, and the token in each of the experts' rows; a row that "
                                  "nobody has is zeros. Then to_experts, the experts, to_tokens. A choice finds its "
                                  "answer at answers[expert, slot], if it has a place")

    def backward(self, kept, dy, weight):
        """(the gradient by x, {"router", "up", "down"}: those by this rank's params), of

            Σ dy · y + weight · balance,        summed over the ranks of comm

        as far as this rank knows it: of its own tokens, and of all tokens that have come to its experts.

        kept  what forward gave for backward, of the same pass. Several forwards may come before the first backward,
              and have theirs in any order
        dy    [tokens, size]: this rank's. weight: a number, this rank's
        """
        raise NotImplementedError("begin with the last product: answers times gates. Each place of an expert has at "
                                  "most one choice in it; its gradient takes the way that its token took, and comes "
                                  "back the way that its answer came")


def global_gradients(dp, ep, grads, count):
    """{name: the gradient of the mean loss over all samples of all ranks}. Collective.

    The ranks form a grid: those along `ep` share the experts, those along `dp` hold the same ones. Samples are divided
    over both: each rank has some of its own.

    dp, ep  Communicators; all_reduce(x) sums in place
    grads   {name: array}, of the sum of losses, as backward left them; not to be changed. "up" and "down" are the
            experts', all other names are parameters that all ranks hold alike
    count   how many samples this rank has
    """
    raise NotImplementedError("begin with the denominator, on which all ranks agree. Then, for each name: who else "
                              "holds this parameter, and whose tokens are in its gradient already?")
