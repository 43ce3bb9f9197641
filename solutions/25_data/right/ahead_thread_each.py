# 25.5: a thread for each batch, which waits for the one before it
import threading
from collections import deque


def ahead(batches, depth):
    waiting, left = deque(), threading.Event()

    def begin(before):
        found = {}

        def read():
            if before is not None:
                before[0].join()
            if left.is_set() or before is not None and before[1]["what"] != "batch":
                found["what"] = "end"
                return
            try:
                found.update(value=next(batches), what="batch")
            except StopIteration:
                found["what"] = "end"
            except BaseException as error:
                found.update(value=error, what="error")
        thread = threading.Thread(target=read)
        thread.start()
        waiting.append((thread, found))
        return thread, found

    last = None
    try:
        for _ in range(depth):
            last = begin(last)
        while True:
            thread, found = waiting.popleft()
            thread.join()
            if found["what"] == "end":
                return
            if found["what"] == "error":
                raise found["value"]
            last = begin(last)
            yield found.pop("value")
    finally:
        left.set()
        for thread, _ in waiting:
            thread.join()
