"""The part of the stand-in that is cupy.cuda: two GPUs, of which one is current, streams, events and graphs."""

import itertools
import threading
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

GPUS = 2
events = []         # what streams and NCCL were told, in order
here = threading.local()


def current():
    return getattr(here, "device", 0)


class Device:
    """One of two GPUs, to be made current for a while or for good."""

    mem_info = (3 << 30, 4 << 30)
    compute_capability = "90"

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


class CUDARuntimeError(RuntimeError):
    """As CuPy's."""


class Graph:
    """What was recorded: functions to call, and arrays whose memory must stay."""

    def __init__(self):
        self.work, self.held = [], []

    def launch(self, stream=None):
        for do in self.work:
            do()


def recorded():
    """The graph that is being recorded, or None."""
    return getattr(here, "graph", None)


def refuse_while_recording(error=None):
    """What would wait for the GPU, or copy to it, can't be recorded."""
    if recorded() is not None:
        here.broken = True
        raise error or CUDARuntimeError("cudaErrorStreamCaptureUnsupported: operation not permitted when stream is "
                                        "capturing")


class Stream:
    """A stream that writes down what it is told."""

    numbers = itertools.count()

    def __init__(self, non_blocking=False):
        self.ptr, self.non_blocking = next(self.numbers), non_blocking

    def __enter__(self):
        self.outer, here.stream = get_current_stream(), self
        return self

    def __exit__(self, *exc):
        here.stream = self.outer

    def begin_capture(self, mode=None):
        assert self is get_current_stream() and self.non_blocking and recorded() is None
        here.graph, here.broken = Graph(), False

    def end_capture(self):
        graph, here.graph = here.graph, None
        if here.broken:
            raise CUDARuntimeError("cudaErrorStreamCaptureInvalidated: operation failed due to a previous error during "
                                   "capture")
        return graph

    def record(self, event=None):
        event = event or Event()
        events.append(("record", self.ptr, event.number))
        return event

    def wait_event(self, event):
        events.append(("wait", self.ptr, event.number))

    def synchronize(self):
        refuse_while_recording()
        events.append(("synchronize", self.ptr, current()))


THE_STREAM = Stream()


def get_current_stream():
    return getattr(here, "stream", THE_STREAM)


class MemoryPool:
    def malloc(self, size):
        raise NotImplementedError("the stand-in's memory is NumPy's")


cuda = ModuleType("cupy.cuda")
vars(cuda).update(
    Device=Device, Event=Event, Stream=Stream, is_available=lambda: True, get_current_stream=get_current_stream,
    Graph=Graph, MemoryPool=MemoryPool, using_allocator=lambda allocator=None: nullcontext(),
    alloc_pinned_memory=lambda nbytes: bytearray(nbytes),
    runtime=SimpleNamespace(getDevice=current, getDeviceCount=lambda: GPUS,
                            runtimeGetVersion=lambda: 13000, CUDARuntimeError=CUDARuntimeError,
                            CUDA_R_16F=2, CUDA_R_16BF=14, CUDA_R_32F=0, CUDA_R_64F=1,
                            getDeviceProperties=lambda i: {"uuid": b"the 16 bytes %03d" % i, "name": b"stand-in"}))
