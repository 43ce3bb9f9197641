# 25.5: Nothing holds the thread up
import threading
from collections import deque


def ahead(batches, depth):
    ready, change, end = deque(maxlen=depth), threading.Condition(), object()

    def read():
        batch = None
        while batch is not end:
            batch = next(batches, end)
            with change:
                ready.append(batch)
                change.notify()

    threading.Thread(target=read, daemon=True).start()
    while True:
        with change:
            change.wait_for(lambda: ready)
            batch = ready.popleft()
        if batch is end:
            return
        yield batch
