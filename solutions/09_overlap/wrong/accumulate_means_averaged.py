# 09.3: a mean of means: each piece
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
    def mean(piece):
        return [g / max(len(piece), 1) / len(pieces) for g in gradients(piece)]
    *first, last = pieces
    with sync.no_sync():
        for piece in first:
            sync.backward(mean(piece))
    sync.backward(mean(last))
