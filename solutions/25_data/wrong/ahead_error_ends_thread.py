# 25.5: nobody hears of it: next waits for ever
import queue
import threading


def ahead(batches, depth):
    found, room, left, end = queue.SimpleQueue(), threading.Semaphore(depth), threading.Event(), object()

    def read():
        batch = None
        while batch is not end:
            room.acquire()
            if left.is_set():
                return
            batch = next(batches, end)
            found.put(batch)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        while (batch := found.get()) is not end:
            room.release()
            yield batch
    finally:
        left.set()
        room.release()
        thread.join()
