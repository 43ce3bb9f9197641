# 09.3: the pieces are added up outside, for one backward
from contextlib import contextmanager


class GradientSync:
    def __init__(self, comm, grads):
        self.comm, self.grads, self.sync = comm, grads, True

    @contextmanager
    def no_sync(self):
        outer, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = outer

    def backward(self, new):
        for grad, more in zip(self.grads, new, strict=True):
            grad += more
            if self.sync:
                self.comm.all_reduce(grad)


def accumulate(sync, pieces, gradients, count):
    totals = [0.0 * g for g in sync.grads]
    for piece in pieces:
        totals = [total + g for total, g in zip(totals, gradients(piece), strict=True)]
    sync.backward([total / count for total in totals])
