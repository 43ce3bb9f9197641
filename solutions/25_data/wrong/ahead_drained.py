# 25.5: begins after close was called
import queue
import threading


def ahead(batches, depth):
    found, room, end = queue.SimpleQueue(), threading.Semaphore(depth), object()

    def read():
        while True:
            room.acquire()
            try:
                batch, error = next(batches, end), None
            except BaseException as problem:
                batch, error = end, problem
            found.put((batch, error))
            if batch is end:
                return

    thread = threading.Thread(target=read)
    thread.start()
    batch, error = None, None
    try:
        while True:
            batch, error = found.get()
            if error is not None:
                raise error
            if batch is end:
                return
            room.release()
            yield batch
    finally:
        while batch is not end:
            room.release()
            batch, error = found.get()
        thread.join()
