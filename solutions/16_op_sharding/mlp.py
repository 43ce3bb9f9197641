"""16.2 By columns, then by rows: two matrices, one sum.

The layer y = tanh(x A + a) B + b, cut over the ranks so that nothing is sent between A and B. Where the ranks' ways
part stands a function f, where they meet again a function g. Each is known by what it does forward and by what its
backward pass does: the two are each other's mirror image.
"""

import numpy as np


def f(comm, x):
    """Where the ways part: x is the same on all ranks. Returns what this rank's part of the layer works on.

    Neither this function nor the next three change the array that they are given.
    """
    # begin with the forward pass, of which nothing is to be done; then think what that means for the next function
    return x


def f_backward(comm, ct):
    """The gradient by x, on all ranks. ct: the gradient by what f returned, of this rank's part of the layer alone."""
    # begin with y = p₀(x) + p₁(x): what is the gradient by x, if rank r knows that of p_r?
    total = ct.copy()
    comm.all_reduce(total)
    return total


def g(comm, x):
    """Where they meet: the sum of all ranks' x, on all ranks."""
    # begin with the collective: comm.all_reduce(x) works in place, and x isn't yours
    total = x.copy()
    comm.all_reduce(total)
    return total


def g_backward(comm, ct):
    """The gradient by this rank's x. ct: the gradient by the sum, the same on all ranks."""
    # begin with s = x₀ + x₁ and a loss of s: what is the gradient by x₀, and who knows it already?
    return ct


class ParallelMLP:
    """This rank's part of y = tanh(x A + a) B + b. Of all elements of A, a and B one rank only has each.

    params  {"A", "a", "B", "b"}: this rank's parts
    """

    def __init__(self, comm, params, cut):
        """Keep this rank's parts, and the whole b.

        comm    the Communicator: comm.rank, comm.size, comm.all_reduce(x)
        params  {"A": [inputs, hidden], "a": [hidden], "B": [hidden, outputs], "b": [outputs]}, whole, the same on all
                ranks; not to be changed. hidden need not be a multiple of comm.size
        cut     yours, of 16.1: cut(x, placement, size)
        """
        # begin with the placement of each: after which cut of A can tanh be taken without sending anything? How must B
        # be cut then?
        self.comm = comm
        placements = {"A": "S1", "a": "S0", "B": "S0", "b": "R"}
        self.params = {name: cut(x, placements[name], comm.size)[comm.rank] for name, x in params.items()}

    def forward(self, x):
        """(y [rows, outputs], whole and the same on all ranks; what backward will need of this pass).

        x  [rows, inputs], the same on all ranks
        """
        # begin with f; two products later comes g, and there is one more thing to be added, once
        A, a, B, b = (self.params[name] for name in "AaBb")
        x = f(self.comm, x)
        h = np.tanh(x @ A + a)
        return g(self.comm, h @ B) + b, (x, h)

    def backward(self, kept, dy):
        """(the gradient by x, whole on all ranks; {"A", "a", "B", "b"}: the gradients by this rank's params).

        kept  what forward gave beside y. Several forwards may be under way
        dy    [rows, outputs]: the gradient by y, the same on all ranks
        """
        # begin with the end: b, then g_backward, then B. The slope of tanh is 1 - tanh²
        (x, h), A, B = kept, self.params["A"], self.params["B"]
        dp = g_backward(self.comm, dy)
        dz = dp @ B.T * (1 - h ** 2)
        grads = {"A": x.T @ dz, "a": dz.sum(0), "B": h.T @ dp, "b": dy.sum(0)}
        return f_backward(self.comm, dz @ A.T), grads
