# 09.3: keeps another from reducing
from contextlib import contextmanager


class GradientSync:
    depth = 0

    def __init__(self, comm, grads):
        self.comm, self.grads, self.sync = comm, grads, True

    @contextmanager
    def no_sync(self):
        GradientSync.depth += 1
        try:
            yield
        finally:
            GradientSync.depth -= 1

    def backward(self, new):
        for grad, more in zip(self.grads, new, strict=True):
            grad += more
            if not GradientSync.depth:
                self.comm.all_reduce(grad)


def accumulate(sync, pieces, gradients, count):
    *first, last = pieces
    with sync.no_sync():
        for piece in first:
            sync.backward([g / count for g in gradients(piece)])
    sync.backward([g / count for g in gradients(last)])
