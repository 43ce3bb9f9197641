# 09.3: nothing is reduced: each rank has its own
from contextlib import contextmanager


class GradientSync:
    def __init__(self, comm, grads):
        self.comm, self.grads, self.sync = comm, grads, True

    @contextmanager
    def no_sync(self):
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before

    def backward(self, new):
        for grad, more in zip(self.grads, new, strict=True):
            grad += more
            if self.sync:
                self.comm.all_reduce(grad)


def accumulate(sync, pieces, gradients, count):
    with sync.no_sync():
        for piece in pieces[:-1] or pieces:
            sync.backward([grad / count for grad in gradients(piece)])
    if len(pieces) > 1:
        sync.backward([grad / count for grad in gradients(pieces[-1])])
