# 09.3: accumulate adds and reduces by itself
"""09.3 Several backward passes, one reduction.

When a batch doesn't fit into memory, it is run in pieces, and the pieces' gradients add up. Only the last piece has to
talk to the other ranks.
"""

from contextlib import contextmanager


class GradientSync:
    """Gradients that add up, and are summed over the ranks after each backward pass that isn't inside no_sync().

    comm   the Communicator: comm.all_reduce(x) makes x the sum of all ranks' x, in place
    grads  list of arrays, zeros at first
    """

    def __init__(self, comm, grads):
        self.comm, self.grads, self.sync = comm, grads, True

    @contextmanager
    def no_sync(self):
        """Inside, backward() talks to nobody. Afterwards everything is as it was before, whatever has happened inside:
        an exception, or another no_sync()."""
        # begin with remembering how `sync` stands; what comes after `yield` in a `finally` runs after an exception too
        outer, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = outer

    def backward(self, new):
        """A pass has worked out `new`, a list of arrays, which stay as they are: add them to grads, in place; outside
        of no_sync() grads then become the sums over all ranks."""
        # begin with adding; one all_reduce per array
        for grad, more in zip(self.grads, new, strict=True):
            grad += more
            if self.sync:
                self.comm.all_reduce(grad)


def accumulate(sync, pieces, gradients, count):
    """Leave in sync.grads the gradient of the mean loss over the global batch, with one set of reductions.

    sync       a GradientSync whose grads are zeros
    pieces     this rank's part of the batch, in one or more pieces; each rank has as many, of any sizes, 0 too.
               The list stays as it is
    gradients  gradients(piece) -> list of arrays: the gradients of the SUM of the piece's losses
    count      number of samples in the global batch: all pieces, all ranks
    """
    for piece in pieces:
        for total, g in zip(sync.grads, gradients(piece), strict=True):
            total += g / count
    for total in sync.grads:
        sync.comm.all_reduce(total)
