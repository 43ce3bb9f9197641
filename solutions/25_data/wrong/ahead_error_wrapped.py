# 25.5: and another error comes out
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
            try:
                batch, error = next(batches, end), None
            except BaseException as problem:
                batch, error = end, problem
            found.put((batch, error))

    thread = threading.Thread(target=read)
    thread.start()
    try:
        while True:
            batch, error = found.get()
            if error is not None:
                raise RuntimeError("reading has failed") from error
            if batch is end:
                return
            room.release()
            yield batch
    finally:
        left.set()
        room.release()
        thread.join()
