# 25.5: a queue of depth places, of which one is taken before a read
import queue
import threading


class Place:
    what = value = None

    def __init__(self):
        self.ready = threading.Event()

    def fill(self, what, value=None):
        self.what, self.value = what, value
        self.ready.set()


def ahead(batches, depth):
    places, stop = queue.Queue(maxsize=depth), threading.Event()

    def produce():
        while True:
            place = Place()
            places.put(place)
            if stop.is_set():
                return place.fill("end")
            try:
                place.fill("batch", next(batches))
            except StopIteration:
                return place.fill("end")
            except BaseException as error:
                return place.fill("error", error)
            del place

    thread = threading.Thread(target=produce)
    thread.start()
    try:
        place = places.get()
        while True:
            place.ready.wait()
            if place.what == "error":
                raise place.value
            if place.what == "end":
                return
            batch = place.value
            yield batch
            del batch
            place = places.get()
    finally:
        stop.set()
        while thread.is_alive():
            try:
                places.get(timeout=0.01)
            except queue.Empty:
                pass
        thread.join()
