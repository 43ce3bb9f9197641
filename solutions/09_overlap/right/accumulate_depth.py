# 09.3: no_sync counts how deep it is, and the last piece comes first
class NoSync:
    def __init__(self, sync):
        self.of = sync

    def __enter__(self):
        self.of.depth += 1

    def __exit__(self, *error):
        self.of.depth -= 1


class GradientSync:
    def __init__(self, comm, grads):
        self.comm, self.grads, self.depth = comm, grads, 0

    def no_sync(self):
        return NoSync(self)

    def backward(self, new):
        for i in range(len(self.grads)):
            self.grads[i][...] = self.grads[i] + new[i]
        if self.depth == 0 and self.comm.size > 1:
            for grad in self.grads:
                self.comm.all_reduce(grad)


def accumulate(sync, pieces, gradients, count):
    pieces = list(pieces)
    while len(pieces) > 1:
        with sync.no_sync():
            sync.backward([g * (1 / count) for g in gradients(pieces.pop())])
    sync.backward([g / count for g in gradients(pieces[0])])
