# 25.5: does the thread read, and then wait for room?
import queue
import threading


def ahead(batches, depth):
    found, end = queue.Queue(depth), object()

    def read():
        for batch in batches:
            found.put(batch)
        found.put(end)

    threading.Thread(target=read, daemon=True).start()
    while (batch := found.get()) is not end:
        yield batch
