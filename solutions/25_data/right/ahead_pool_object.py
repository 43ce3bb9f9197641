# 25.5: a pool of one thread, in an object; weakref.finalize ends it
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor


class ahead:
    def __init__(self, batches, depth):
        self.batches, self.depth, self.futures, self.finalizer = batches, depth, deque(), None
        self.over = False

    def __iter__(self):
        return self

    def __next__(self):
        if self.over:
            raise StopIteration
        if self.finalizer is None:
            pool = ThreadPoolExecutor(max_workers=1)
            self.finalizer = weakref.finalize(self, pool.shutdown, cancel_futures=True)
            self.submit = pool.submit
        while len(self.futures) <= self.depth:
            self.futures.append(self.submit(read, self.batches))
        try:
            found = self.futures.popleft().result()
        except BaseException:
            self.close()
            raise
        if not found:
            self.close()
            raise StopIteration
        return found[0]

    def close(self):
        self.over = True
        if self.finalizer is not None:
            self.finalizer()


def read(batches):
    try:
        return [next(batches)]
    except StopIteration:
        return []
