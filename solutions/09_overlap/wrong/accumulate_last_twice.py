# 09.3: the last piece counts twice
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
    with sync.no_sync():
        for piece in pieces:
            sync.backward([g / count for g in gradients(piece)])
    sync.backward([g / count for g in gradients(pieces[-1])])
