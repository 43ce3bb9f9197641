# 25.5: and nobody hears of it: next says that this is the end
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
                print(problem)
                batch, error = end, None
            found.put((batch, error))

    thread = threading.Thread(target=read)
    thread.start()
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
        left.set()
        room.release()
        thread.join()
