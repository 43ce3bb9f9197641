# 09.2: is never posted
import numpy as np


class Reducer:
    """Counts what every rank has used before it posts, but forgets what stays at home."""

    def __init__(self, comm, buckets, grads):
        self.comm, self.buckets, self.grads = comm, buckets, grads
        self.there = np.zeros(len(grads))

    def ready(self, i):
        self.there[i] = 1

    def finish(self):
        there = self.there.copy()
        self.comm.all_reduce(there)
        for bucket in self.buckets:
            if all(there[i] == self.comm.size for i in bucket):
                for i in bucket:
                    self.comm.all_reduce(self.grads[i])
        self.there[:] = 0
