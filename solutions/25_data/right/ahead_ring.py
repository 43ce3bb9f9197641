# 25.5: a ring of slots and two semaphores
import threading


def ahead(batches, depth):
    slots, empty, full, closed = [None] * (depth + 1), threading.Semaphore(depth), threading.Semaphore(0), False

    def read():
        at = 0
        while True:
            empty.acquire()
            if closed:
                break
            try:
                slots[at % (depth + 1)] = [next(batches)]
            except StopIteration:
                slots[at % (depth + 1)] = None
            except BaseException as problem:
                slots[at % (depth + 1)] = problem
            full.release()
            at += 1

    thread, at = threading.Thread(target=read, name="reader"), 0
    thread.start()
    try:
        full.acquire()
        while (slot := slots[at % (depth + 1)]) is not None:
            if isinstance(slot, BaseException):
                raise slot
            slots[at % (depth + 1)] = None
            empty.release()
            yield slot.pop()
            at += 1
            full.acquire()
    finally:
        closed = True
        empty.release()
        thread.join()
