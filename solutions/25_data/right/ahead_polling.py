# 25.5: both sides look again and again
import threading
import time
from collections import deque

SECONDS = 0.004


def ahead(batches, depth):
    ready, left = deque(), []

    def read():
        while not left:
            if len(ready) >= depth:
                time.sleep(SECONDS)
                continue
            try:
                ready.append(("batch", next(batches)))
            except StopIteration:
                ready.append(("end", None))
                return
            except BaseException as error:
                ready.append(("error", error))
                return

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        while True:
            while not ready:
                time.sleep(SECONDS)
            what, value = ready.popleft()
            if what == "end":
                break
            if what == "error":
                raise value
            yield value
    finally:
        left.append(True)
        thread.join()
