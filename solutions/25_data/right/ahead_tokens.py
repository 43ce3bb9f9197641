# 25.5: two queues, one of leaves to read and one of what was read; the first batch is read by the loop itself
import queue
import threading

END = object()


def ahead(batches, depth):
    leaves, found = queue.Queue(), queue.Queue()
    for _ in range(depth):
        leaves.put(True)

    def read():
        while leaves.get():
            try:
                found.put((True, next(batches, END)))
            except BaseException as error:
                found.put((False, error))
                break

    batch = next(batches, END)
    thread = threading.Thread(target=read)
    thread.start()
    try:
        while batch is not END:
            yield batch
            leaves.put(True)
            good, batch = found.get()
            if not good:
                raise batch
    finally:
        with leaves.mutex:
            leaves.queue.clear()
        leaves.put(False)
        thread.join()
