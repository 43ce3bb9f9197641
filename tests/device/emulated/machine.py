"""GPUs that are not there: their memory, streams, events, graphs and modules; kernels run in minitorch_dist's emulator.

What CUDA leaves open is decided against the program: memory begins as NaN; work on a stream runs when somebody waits
for it, no earlier, so that what is read too early isn't there yet; a copy from pinned memory reads it at that time,
too. A kernel may touch arrays of its own GPU alone, and be given to streams of that GPU alone; each has its own null
stream.

Several threads may have work run, one at a time: those of the program, and those that answer another process (nccl.py).
Who waits for a process holds nothing meanwhile.
"""

import bisect
import ctypes
import os
import threading
import time
import traceback
from collections import deque

import numpy as np

from minitorch_dist.kernels.emulator import EmulationError, Unknown, parse
from minitorch_dist.kernels.emulator.counts import Counts
from minitorch_dist.kernels.emulator.machine import Code, run
from minitorch_dist.kernels.emulator.memory import ALIGNED, SECTOR, GlobalMemory, Region

IDLE = os.environ.get("IDLE_GPU")      # whether the GPU computes nothing, in no time: see idle.py
TOTAL = (80 if IDLE else 8) << 30      # bytes of a GPU
CAPABILITY = 90
NULL = 0                # a GPU's stream that is there from the beginning, whose order all its "blocking" ones keep
PATIENCE = 60           # seconds that one waits for another thread or process while nothing is given or done
LOOK = 0.5              # seconds that who asks whether work is done gives it


class CudaError(Exception):
    """(CUDA's number of an error, words)."""


INVALID, MEMORY, DEVICE, HANDLE, NOT_READY, LAUNCH = 1, 2, 101, 400, 600, 719
UNSUPPORTED_IN_CAPTURE, CAPTURE_INVALIDATED = 900, 901
MAX_DYNAMIC_SHARED = 8      # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Stream:
    """Work in order. blocking: it keeps the order of the null stream. device: whose it is."""

    def __init__(self, blocking=True, device=0):
        self.blocking, self.work, self.device = blocking, deque(), device
        self.graph = None       # what is being recorded
        self.doing = ""         # what its first work waits for, in words
        self.runner = self.looker = None    # the thread that runs its first work; one that does so beside the program

    def has_done(self, upto):
        """Whether its work up to a number is done."""
        return not self.work or self.work[0][0] > upto


class Event:
    """What a stream, of its GPU, had been given when it was recorded."""

    def __init__(self, device=0):
        self.device = device
        self.stream, self.number, self.time, self.graph = None, 0, None, None


class Uncounted(Counts):
    """Costs aren't asked for: their counting takes as long as the rest."""

    def global_access(self, *_):
        pass

    shared_access = global_access


class Memory(GlobalMemory):
    """The arrays of one GPU, found by address among many."""

    def __init__(self):
        self.regions, self.starts = [], []

    def add(self, region):
        at = bisect.bisect(self.starts, region.start)
        self.regions.insert(at, region)
        self.starts.insert(at, region.start)

    def include(self, arrays):
        for name, array in arrays.items():
            at = bisect.bisect(self.starts, array.ctypes.data) - 1
            if at < 0 or self.regions[at].end <= array.ctypes.data:
                self.add(Region([array], name))

    def remove(self, start):
        at = bisect.bisect_left(self.starts, start)
        del self.regions[at], self.starts[at]

    def parts(self, addresses, size, lanes, verb):
        low = int(addresses.min())
        at = bisect.bisect(self.starts, low) - 1
        if at >= 0 and not (addresses % size).any() and int(addresses.max()) + size <= self.regions[at].end:
            return [(self.regions[at], None)]
        return super().parts(addresses, size, lanes, verb)


class Gpus:
    """`count` GPUs, as a process sees them."""

    def __init__(self, count=1):
        self.count, self.here = count, threading.local()
        self.memories = [Memory() for _ in range(count)]
        self.rooms, self.pinned = {}, {}            # address -> what keeps it alive: (array, size, device)
        self.nulls = [Stream(device=device) for device in range(count)]
        self.handles, self.next, self.number = {}, 0x1000, 0
        self.launches = []                          # (kernel, grid, threads) in order
        self.changed = threading.Condition()        # held by who uses anything of this; told when work was done
        self.done, self.failure = 0, None           # how much work; an error that the program hasn't been told yet

    @property
    def current(self):
        """The GPU of this thread."""
        return getattr(self.here, "device", 0)

    @current.setter
    def current(self, device):
        self.here.device = device

    # ---------------------------------------------------------------- handles

    def handle(self, thing):
        self.next += 16
        self.handles[self.next] = thing
        return self.next

    def get(self, handle, kind):
        thing = self.handles.get(handle)
        if not isinstance(thing, kind):
            raise CudaError(HANDLE, f"{handle:#x} is no {kind.__name__}")
        return thing

    def stream(self, handle, device=None):
        """Of the null one that of this GPU, or of the current one."""
        if handle in (NULL, 1, 2):      # 1: legacy, 2: per thread
            return self.nulls[self.current if device is None else device]
        return self.get(handle, Stream)

    # ---------------------------------------------------------------- memory

    def allocate(self, size, pinned=False):
        self.refuse_in_capture("allocates memory", relaxed=True)
        if not pinned and size > self.free():
            raise CudaError(MEMORY, f"{size:,} bytes are asked for, {self.free():,} are free")
        room = np.empty(-(-size // SECTOR) * SECTOR + 2 * ALIGNED, np.uint8)
        if not IDLE:
            room.fill(0xff)
        first = -room.ctypes.data % ALIGNED
        at = room.ctypes.data + first
        if pinned:
            self.pinned[at] = room, size
        else:
            self.rooms[at] = room, size, self.current
            self.memories[self.current].add(Region([room[first:first + size]], f"memory of {size:,} bytes"))
        return at

    def release(self, at):
        if at not in self.rooms:
            raise CudaError(INVALID, f"{at:#x} was never allocated")
        self.refuse_in_capture("frees memory", relaxed=True)
        self.finish()
        *_, device = self.rooms.pop(at)
        self.memories[device].remove(at)

    def release_pinned(self, at):
        self.refuse_in_capture("frees memory", relaxed=True)
        self.finish()
        del self.pinned[at]

    def free(self):
        return TOTAL - sum(size for _, size, device in self.rooms.values() if device == self.current)

    def device_of(self, address):
        """The GPU whose memory an address is in, or None."""
        for device, memory in enumerate(self.memories):
            at = bisect.bisect(memory.starts, address) - 1
            if at >= 0 and address < memory.regions[at].end:
                return device
        return None

    def check(self, address, size, device=None):
        """CudaError unless these bytes are in one piece of this GPU's memory."""
        memory = self.memories[self.current if device is None else device]
        at = bisect.bisect(memory.starts, address) - 1
        if at < 0 or address + size > memory.regions[at].end:
            raise CudaError(INVALID, f"{size:,} bytes at {address:#x} are not in the GPU's memory")

    def is_pinned(self, address):
        return any(at <= address < at + size for at, (_, size) in self.pinned.items())

    # ---------------------------------------------------------------- streams

    def queue(self, handle, work, waits=False):
        """Give a stream work; waits: the program waits until it is done."""
        stream = self.stream(handle)
        if stream.graph is not None:
            if waits:
                self.refuse_in_capture("waits")
            stream.graph.append(work)
            return
        if stream in self.nulls and any(s.graph is not None and s.blocking for s in self.streams(stream.device)):
            self.refuse_in_capture("uses the null stream")
        self.number += 1
        stream.work.append((self.number, self.current, work))
        if waits:
            self.drain(stream, self.number)

    def streams(self, device=None):
        """Those of a GPU, or of all."""
        made = [thing for thing in self.handles.values() if isinstance(thing, Stream)]
        return [stream for stream in self.nulls + made if device in (None, stream.device)]

    def drain(self, stream, upto):
        """Run a stream's work up to a number, and before it what keeps its order: its numbers are smaller, so that no
        two threads wait for each other. Work is on its stream until it is done. Where it fails the rest of all streams
        is dropped: its copies may go to memory of a program that has given up. (CUDA does nothing more, ever.)
        """
        with self.changed:
            while True:
                if self.failure is not None:
                    failure, self.failure = self.failure, self.failure if self.is_beside else None
                    raise failure
                if stream.has_done(upto) or stream.runner == threading.get_ident():
                    return      # (the latter: in the middle of this work Python has collected something)
                if stream.runner is None:
                    self._first(stream)
                else:
                    self.wait(lambda: stream.runner is None or stream.has_done(upto),
                              lambda: f"a stream's work isn't done: {stream.doing or 'no NCCL'}")

    def _first(self, stream):
        """Run a stream's first work."""
        (number, device, work), null = stream.work[0], self.nulls[stream.device]
        stream.runner, outer = threading.get_ident(), self.current
        try:
            if stream.blocking:
                mine = [s for s in self.streams(stream.device) if s.blocking and s is not null]
                for other in mine if stream is null else [null]:
                    self.drain(other, number)
            self.current = device
            work()
        except BaseException as error:
            for other in self.streams():
                other.work.clear()
            self.failure = error if self.is_beside else None
            raise
        finally:
            if stream.work and stream.work[0][0] == number:
                stream.work.popleft()
            self.done += 1
            self.current, stream.runner = outer, None
            self.changed.notify_all()

    def wait(self, condition, words):
        """Let other threads go on until a condition holds; CudaError with words() once PATIENCE seconds have passed in
        which no work was given or done."""
        seen = None
        while not condition():
            if seen != (self.number, self.done):
                seen, since = (self.number, self.done), time.monotonic()
            if time.monotonic() - since > PATIENCE:
                raise CudaError(LAUNCH, f"{words()} after {PATIENCE} seconds in which nothing else was done")
            self.changed.wait(min(PATIENCE / 4, 1))

    @property
    def is_beside(self):
        """Whether this thread isn't the program's, which has to be told of its errors."""
        return getattr(self.here, "beside", False)

    def beside(self, stream, upto):
        """Run a stream's work in a thread that the program doesn't wait for; the error, if there was one."""
        self.here.beside = True
        try:
            self.drain(stream, upto)
        except CudaError as error:
            return error
        except Exception:       # a fault of the emulated GPU's own
            return CudaError(LAUNCH, traceback.format_exc())

    def is_done(self, stream, upto):
        """Whether a stream's work up to a number was done when this began. Some may wait for another process: what is
        left goes on beside the program."""
        with self.changed:
            self.drain(stream, 0)       # raises what went wrong meanwhile
            if stream.has_done(upto):
                return True
            if stream.looker is None or not stream.looker.is_alive():
                stream.looker = threading.Thread(target=self.beside, args=(stream, upto), daemon=True)
                stream.looker.start()
            self.changed.wait_for(lambda: stream.has_done(upto), LOOK)
            return False

    def finish(self):
        """Run all work."""
        for stream in self.streams():
            self.drain(stream, self.number)

    def synchronize(self, handle=None):
        """Wait for a stream, or for all of the current GPU."""
        self.refuse_in_capture("waits for the GPU", handle)
        for stream in self.streams(self.current) if handle is None else [self.stream(handle)]:
            self.drain(stream, self.number)

    def refuse_in_capture(self, what, handle=None, relaxed=False):
        """What a recording, of this stream or of any, doesn't allow: it spoils the recording. relaxed: a relaxed one
        does."""
        recording = [s for s in (self.streams() if handle is None else [self.stream(handle)])
                     if s.graph is not None and not (relaxed and s.graph.relaxed)]
        for stream in recording:
            stream.graph.spoilt = True
        if recording:
            raise CudaError(UNSUPPORTED_IN_CAPTURE, f"something {what} while a stream is recorded")

    def record(self, handle, stream_handle):
        event, stream = self.get(handle, Event), self.stream(stream_handle)
        self.refuse_another(stream, event.device, "an event")

        def happens():
            event.time = time.perf_counter()
        event.time = None
        self.queue(stream_handle, happens)
        event.stream, event.number, event.graph = stream, self.number, stream.graph

    def refuse_another(self, stream, device, what):
        """What is of one GPU can't be given to another's stream. (Copies can, and a stream may wait for any event.)"""
        if stream.device != device:
            raise CudaError(HANDLE, f"{what} of GPU {device} on a stream of GPU {stream.device}")

    def wait_event(self, stream_handle, handle):
        event = self.get(handle, Event)
        if event.graph is not None:         # what comes next on this stream is recorded, too
            if event.graph is not event.stream.graph:
                raise CudaError(INVALID, "the event is one of a recording that has ended")
            self.stream(stream_handle).graph = event.graph
        elif event.stream is not None:
            source, number = event.stream, event.number
            self.queue(stream_handle, lambda: self.drain(source, number))

    def begin_capture(self, handle, relaxed):
        if self.stream(handle) in self.nulls:
            raise CudaError(UNSUPPORTED_IN_CAPTURE, "the null stream can't be recorded")
        self.stream(handle).graph = Graph(relaxed)

    def end_capture(self, handle):
        graph = self.stream(handle).graph
        for stream in self.streams():
            stream.graph = None if stream.graph is graph else stream.graph
        if graph.spoilt:
            raise CudaError(CAPTURE_INVALIDATED, "the recording was spoilt")
        return graph

    def start_graph(self, graph, handle):
        for work in graph:
            self.queue(handle, work)

    def synchronize_event(self, handle):
        event = self.get(handle, Event)
        self.refuse_in_capture("waits for an event", relaxed=True)
        if event.graph is not None and event.graph is event.stream.graph:
            self.refuse_in_capture("waits for an event that is being recorded")
        elif event.stream is not None:
            self.drain(event.stream, event.number)

    # ---------------------------------------------------------------- copies

    def copy(self, to, source, size, handle=NULL, waits=False):
        """memcpy between any two places. From pageable memory the bytes are read now; to it the program waits."""
        if not size:
            return
        places = [(at, self.device_of(at)) for at in (to, source)]
        for at, device in places:
            if device is not None:
                region = self.memories[device].regions[bisect.bisect(self.memories[device].starts, at) - 1]
                if at + size > region.end:
                    raise CudaError(INVALID, f"a copy of {size:,} bytes at {at - region.start:,} of {region.name}")
        pageable = [device is None and not self.is_pinned(at) for at, device in places]
        if pageable[1] and not waits:
            kept = ctypes.create_string_buffer(ctypes.string_at(source, size), size)
            source = ctypes.addressof(kept)
        else:
            kept = None
        self.queue(handle, lambda: (ctypes.memmove(to, source, size), kept), waits or pageable[0])

    def fill(self, to, value, size, handle=NULL, waits=False):
        self.queue(handle, lambda: ctypes.memset(to, value, size), waits)

    # ---------------------------------------------------------------- kernels

    def launch(self, function, grid, threads, shared, handle, addresses):
        """Start a kernel; addresses: of its arguments, which are read now."""
        program, device = function.code.program, self.current
        self.refuse_another(self.stream(handle), device, f"kernel {program.name}")
        parameters = {}
        for i, (name, kind) in enumerate(program.parameters.items()):
            raw = ctypes.string_at(addresses[i], program.size(name))
            value = np.frombuffer(raw, np.uint8)
            parameters[name] = value if "[" in kind else value.view(f"u{len(raw)}")[0]
        if not 0 < np.prod(threads) <= 1024 or not np.prod(grid) or max(grid[1:]) > 65535:
            raise CudaError(INVALID, f"{program.name}: a grid of {grid}, blocks of {threads} threads")
        most = function.attributes.get(MAX_DYNAMIC_SHARED, 48 << 10)
        if program.shared + shared > most:
            raise CudaError(INVALID, f"{program.name}: {program.shared + shared:,} bytes of shared memory of {most:,}")

        def work():
            counts = Uncounted(program.name, grid, threads)
            try:
                run(function.code, grid, threads, parameters, self.memories[device], shared, counts)
            except (EmulationError, Unknown) as error:
                raise CudaError(LAUNCH, str(error)) from error
        self.launches.append((program.name, grid, threads))
        self.queue(handle, work)


class Graph(list):
    """Work that was recorded. relaxed: meanwhile, memory may be taken and other streams be waited for."""

    def __init__(self, relaxed):
        super().__init__()
        self.relaxed, self.spoilt = relaxed, False


class Module:
    """PTX that was loaded."""

    def __init__(self, text):
        self.text = text


class Function:
    """A kernel of a module."""

    def __init__(self, code):
        self.code, self.attributes = code, {}


CODES = {}      # (PTX, name) -> Code: CuPy loads the same text again for each array type's kernel


def function_of(module, name):
    if (module.text, name) not in CODES:
        CODES[module.text, name] = Code(parse(module.text, name))
    return Function(CODES[module.text, name])
