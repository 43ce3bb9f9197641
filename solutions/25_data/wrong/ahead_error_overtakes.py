# 25.5: those that were read before it come first
import queue
import threading


def ahead(batches, depth):
    found, room, left, end = queue.SimpleQueue(), threading.Semaphore(depth), threading.Event(), object()

    failed = []

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
            if error is not None:
                failed.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        while True:
            batch, error = found.get()
            if failed:
                raise failed[0]
            if batch is end:
                return
            room.release()
            yield batch
    finally:
        left.set()
        room.release()
        thread.join()
