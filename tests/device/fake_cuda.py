"""The part of the stand-in that is cupy.cuda: two GPUs, of which one is current, streams and events."""

import itertools
import threading
from types import ModuleType, SimpleNamespace

GPUS = 2
events = []         # what streams and NCCL were told, in order
here = threading.local()


def current():
    return getattr(here, "device", 0)


class Device:
    """One of two GPUs, to be made current for a while or for good."""

    mem_info = (3 << 30, 4 << 30)

    def __init__(self, number=None):
        self.id = current() if number is None else number

    def __eq__(self, other):
        return self.id == other.id

    def __enter__(self):
        self.outer, here.device = current(), self.id
        return self

    def __exit__(self, *exc):
        here.device = self.outer

    def use(self):
        here.device = self.id


class Event:
    """Everything that it could wait for has happened."""

    numbers = itertools.count()

    def __init__(self):
        self.number, self.done = next(self.numbers), True


class Stream:
    """A stream that writes down what it is told."""

    numbers = itertools.count()

    def __init__(self, non_blocking=False):
        self.ptr = next(self.numbers)

    def record(self, event=None):
        event = event or Event()
        events.append(("record", self.ptr, event.number))
        return event

    def wait_event(self, event):
        events.append(("wait", self.ptr, event.number))

    def synchronize(self):
        events.append(("synchronize", self.ptr, current()))


THE_STREAM = Stream()

cuda = ModuleType("cupy.cuda")
vars(cuda).update(
    Device=Device, Event=Event, Stream=Stream, is_available=lambda: True, get_current_stream=lambda: THE_STREAM,
    alloc_pinned_memory=lambda nbytes: bytearray(nbytes),
    runtime=SimpleNamespace(getDevice=current, getDeviceCount=lambda: GPUS,
                            getDeviceProperties=lambda i: {"uuid": b"the 16 bytes %03d" % i, "name": b"stand-in"}))
