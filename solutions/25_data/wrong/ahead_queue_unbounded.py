# 25.5: Nothing holds the thread up: Queue(0) has room for any number
import queue
import threading


def ahead(batches, depth):
    found, end = queue.Queue(), object()

    def read():
        for batch in batches:
            found.put(batch)
        found.put(end)

    threading.Thread(target=read, daemon=True).start()
    while (batch := found.get()) is not end:
        yield batch
