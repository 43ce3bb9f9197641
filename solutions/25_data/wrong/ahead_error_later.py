# 25.5: close raises the error of read 2
import queue
import threading


def ahead(batches, depth):
    found, room, left, end = queue.SimpleQueue(), threading.Semaphore(depth), threading.Event(), object()

    errors = []

    def read():
        while True:
            room.acquire()
            if left.is_set():
                return
            try:
                found.put((next(batches, end), None))
            except BaseException as error:
                errors.append(error)
                found.put((end, None))

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
        if errors:
            raise errors[0]
