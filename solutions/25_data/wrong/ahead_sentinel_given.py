# 25.5: which is no batch, where the end was to come
import queue
import threading


def ahead(batches, depth):
    found, room, left, end = queue.SimpleQueue(), threading.Semaphore(depth), threading.Event(), object()

    def read():
        while True:
            room.acquire()
            if left.is_set():
                return
            try:
                found.put((next(batches, end), None))
            except BaseException as error:
                found.put((end, error))

    thread = threading.Thread(target=read)
    thread.start()
    try:
        while True:
            batch, error = found.get()
            if error is not None:
                raise error
            room.release()
            yield batch
            if batch is end:
                return
    finally:
        left.set()
        room.release()
        thread.join()
