# 09.3: no_sync() as a class of its own, each piece in an ExitStack
from contextlib import ExitStack


class Quiet:
    def __init__(self, sync):
        self.sync = sync

    def __enter__(self):
        self.outer, self.sync.sync = self.sync.sync, False

    def __exit__(self, *error):
        self.sync.sync = self.outer


class GradientSync:
    def __init__(self, comm, grads):
        self.comm, self.grads, self.sync = comm, grads, True

    def no_sync(self):
        return Quiet(self)

    def backward(self, new):
        for grad, more in zip(self.grads, new, strict=True):
            grad += more
            if self.sync:
                self.comm.all_reduce(grad)


def accumulate(sync, pieces, gradients, count):
    for i, piece in enumerate(pieces):
        with ExitStack() as stack:
            if i < len(pieces) - 1:
                stack.enter_context(sync.no_sync())
            sync.backward([g / count for g in gradients(piece)])
