# 09.2: one Reducer alone is right
import numpy as np

GRADS = []


class Reducer:
    def __init__(self, comm, buckets, grads):
        self.comm, self.buckets = comm, buckets
        GRADS[:] = grads
        self.begin()

    def begin(self):
        self.missing = [set(bucket) for bucket in self.buckets]
        self.posted = []

    def ready(self, i):
        for missing in self.missing:
            missing.discard(i)
        while len(self.posted) < len(self.buckets) and not self.missing[len(self.posted)]:
            self.post()

    def post(self):
        bucket = self.buckets[len(self.posted)]
        flat = np.concatenate([GRADS[i].ravel() for i in bucket])
        self.posted.append((flat, self.comm.all_reduce(flat, async_op=True)))

    def finish(self):
        while len(self.posted) < len(self.buckets):
            self.post()
        for bucket, (flat, work) in zip(self.buckets, self.posted):
            work.wait()
            at = 0
            for i in bucket:
                grad = GRADS[i]
                grad[...] = flat[at:at + grad.size].reshape(grad.shape)
                at += grad.size
        self.begin()
