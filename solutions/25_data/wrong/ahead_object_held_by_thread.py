# 25.5: unless the thread itself holds on to the object
import threading
from collections import deque


class Shared:
    def __init__(self, batches, depth):
        self.batches, self.depth = batches, depth
        self.change, self.ready, self.closed = threading.Condition(), deque(), False

    def read(self):
        kind = "batch"
        while kind == "batch":
            with self.change:
                self.change.wait_for(lambda: self.closed or len(self.ready) < self.depth)
                if self.closed:
                    return
            try:
                item = "batch", next(self.batches)
            except StopIteration:
                item = "end", None
            except BaseException as error:
                item = "error", error
            with self.change:
                self.ready.append(item)
                self.change.notify_all()
            kind = item[0]
            del item


class ahead:
    def __init__(self, batches, depth):
        self.shared, self.thread, self.over = Shared(batches, depth), None, False

    def __iter__(self):
        return self

    def __next__(self):
        if self.over:
            raise StopIteration
        if self.thread is None:
            self.thread = threading.Thread(target=lambda: self.shared.read())
            self.thread.start()
        shared = self.shared
        with shared.change:
            shared.change.wait_for(lambda: shared.ready)
            kind, value = shared.ready.popleft()
            shared.change.notify_all()
        if kind == "batch":
            return value
        self.close()
        if kind == "error":
            raise value
        raise StopIteration

    def close(self):
        self.over = True
        with self.shared.change:
            self.shared.closed = True
            self.shared.change.notify_all()
        if self.thread is not None:
            self.thread.join()

    __del__ = close
