# 25.5: Nothing holds the thread up
import queue
import threading


def ahead(batches, depth):
    found, left, end = queue.SimpleQueue(), threading.Event(), object()

    def read():
        batch = None
        while batch is not end:
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
                raise error
            if batch is end:
                return
            yield batch
    finally:
        left.set()
        thread.join()
