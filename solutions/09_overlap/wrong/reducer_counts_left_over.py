# 09.2: in the later ones buckets leave before their gradients are there
import numpy as np


class Reducer:
    def __init__(self, comm, buckets, grads):
        self.comm, self.buckets, self.grads = comm, buckets, grads
        self.of = {i: k for k, bucket in enumerate(buckets) for i in bucket}
        self.flats = [np.empty(sum(grads[i].size for i in bucket), grads[0].dtype) for bucket in buckets]
        self.counts, self.works = [len(bucket) for bucket in buckets], []

    def ready(self, i):
        self.counts[self.of[i]] -= 1
        while len(self.works) < len(self.counts) and self.counts[len(self.works)] == 0:
            self.send()

    def send(self):
        k = len(self.works)
        np.concatenate([self.grads[i].reshape(-1) for i in self.buckets[k]], out=self.flats[k])
        self.works.append(self.comm.all_reduce(self.flats[k], async_op=True))

    def finish(self):
        while len(self.works) < len(self.buckets):
            self.send()
        while self.works:
            self.works.pop().wait()
            bucket, flat = self.buckets[len(self.works)], self.flats[len(self.works)]
            ends = np.cumsum([self.grads[i].size for i in bucket])
            for i, part in zip(bucket, np.split(flat, ends[:-1]), strict=True):
                self.grads[i].flat = part
        self.counts = [count or len(bucket) for count, bucket in zip(self.counts, self.buckets, strict=True)]
