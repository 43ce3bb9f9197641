# 09.3: all kept until the last one's are there
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
        for grad, more in zip(self.grads, new):
            grad += more
            if self.sync:
                self.comm.all_reduce(grad)


def accumulate(sync, pieces, gradients, count):
    found = [gradients(piece) for piece in pieces]
    sync.backward([sum(of_all) / count for of_all in zip(*found)])
