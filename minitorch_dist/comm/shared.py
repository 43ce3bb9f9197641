"""The node's shared window: arrays that all ranks of a node can read and write, and the collectives on them.

Memory. `empty` maps one file of tmpfs into every rank; it holds one part per rank. The name is removed as soon as all
have mapped it, so nothing can be left behind; each rank unmaps its own mapping when its last array of it dies.

Meeting. Each rank has a line of two words that only it writes:

    POSTED    number of the last operation that it has reached: its input is ready, its output may be written
    FINISHED  number of the last operation of which it has done its part

All ranks run the same operations in the same order, so a number means the same operation everywhere:

    rank 0   POSTED=7 ...... all POSTED >= 7?  reduce my slice, write it to all   FINISHED=7   all FINISHED >= 7?
    rank 1        POSTED=7 . all POSTED >= 7?  reduce my slice, write it to all      FINISHED=7   all FINISHED >= 7?

Posting is one store, so an operation can be posted from a gradient hook and done later.
"""

import bisect
import collections
import mmap
import os
import platform
import tempfile
import time
import weakref

import numpy as np

from .reduction import OPS, cut, tree_reduce

POSTED, FINISHED = 0, 1
LINE_BYTES = 128          # two cache lines, which processors fetch in pairs: no two ranks write to the same pair
GRAIN = 16                # slices begin on multiples of 16 elements: whole cache lines from 4-byte elements up
BLOCK_BYTES = 128 << 10   # a slice is reduced in blocks that stay in the cache between being summed and being copied
SPINS = 200               # looks at the others' flags before the core is offered to somebody else
NAME_BYTES = 512

FOLDER = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
ORDERED_STORES = platform.machine() in ("x86_64", "AMD64")   # a store becomes visible after those before it
give_way = getattr(os, "sched_yield", lambda: time.sleep(0))


def cores():
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def map_together(engine, nbytes):
    """Zeroed memory that every rank of the engine has mapped, `nbytes` for each: a list of uint8 views, by rank.

    Collective. None on all ranks where one of them can't map it, for want of memory (/dev/shm is 64 MB in a default
    container) or because it sees another /dev/shm. The mapping goes when the last of the views has gone.
    """
    stride = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    name, file, memory = np.zeros(NAME_BYTES, np.uint8), None, None
    try:
        if engine.rank == 0:
            file, path = tempfile.mkstemp(prefix="minitorch_", dir=FOLDER)
            os.ftruncate(file, stride * engine.size)
            name[:len(path)] = np.frombuffer(path.encode(), np.uint8)
    except OSError:
        pass   # the name stays empty, the others can't open it, and all agree below
    engine.broadcast(name, 0)
    path = name.tobytes().rstrip(b"\0").decode()
    try:
        if engine.rank != 0:
            file = os.open(path, os.O_RDWR)
        if hasattr(os, "posix_fallocate"):   # else a full tmpfs shows as SIGBUS at the first touch
            os.posix_fallocate(file, engine.rank * stride, stride)
        memory = mmap.mmap(file, stride * engine.size)
    except (OSError, ValueError, TypeError):
        pass
    mapped = np.array([memory is not None], np.int32)
    engine.all_reduce(mapped, "min")
    if engine.rank == 0 and path:
        os.unlink(path)
    if file is not None:
        os.close(file)
    if not mapped[0]:
        return None
    return [memoryview(memory)[rank * stride:rank * stride + nbytes] for rank in range(engine.size)]


def _address(x):
    return x.__array_interface__["data"][0]   # twice as fast as x.ctypes.data


class Segment:
    """The parts of all ranks of one mapping, and where this rank's own part lies in its address space."""

    def __init__(self, parts, mine):
        self.first, self.last = _address(mine), _address(mine) + mine.nbytes
        self.parts = [np.frombuffer(part, np.uint8) for part in parts]
        self._views = {}

    def views(self, offset, count, dtype):
        """The `count` elements that begin `offset` bytes into the part, in each rank's part."""
        key = offset, count, dtype
        if key not in self._views:
            if len(self._views) > 1000:   # a program with ever new shapes
                self._views.clear()
            last = offset + count * dtype.itemsize
            self._views[key] = [part[offset:last].view(dtype) for part in self.parts]
        return self._views[key]


class Window:
    """The shared window of a communicator whose ranks all run on one node; `engine` is its MPI engine."""

    @classmethod
    def open(cls, engine):
        """The window, or None (on all ranks) where the ranks share no memory. Collective."""
        lines = map_together(engine, LINE_BYTES) if engine.on_one_node else None
        return None if lines is None else cls(engine, lines)

    def __init__(self, engine, lines):
        self.engine, self.rank, self.size = engine, engine.rank, engine.size
        words = [line.cast("Q") for line in lines]
        self._mine, self._others = words[self.rank], [line for i, line in enumerate(words) if i != self.rank]
        self._posted = 0                       # operations posted by this rank
        self._pending = collections.deque()    # those it hasn't finished, oldest first
        self._spins = SPINS if self.size <= cores() else 0
        self._firsts, self._segments = [], []  # sorted by address

    # ------------------------------------------------------------ memory

    def empty(self, shape, dtype):
        """A zeroed array in the window, or None on all ranks where memory is short. Collective."""
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        parts = map_together(self.engine, nbytes)
        if parts is None:
            return None
        mine = np.frombuffer(parts[self.rank], np.uint8)
        self._register(Segment(parts, mine), mine)
        return mine.view(dtype).reshape(shape)

    def _register(self, segment, mine):
        # NumPy gives every view of the array `mine` as its base, so that it lives as long as any of them.
        weakref.finalize(mine, self._forget, segment.first).atexit = False
        at = bisect.bisect(self._firsts, segment.first)
        self._firsts.insert(at, segment.first)
        self._segments.insert(at, segment)

    def _forget(self, first):
        at = self._firsts.index(first)
        del self._firsts[at], self._segments[at]

    def find(self, x):
        """(segment, offset in bytes) where the contiguous array x lies in the window, else None."""
        address = _address(x)
        at = bisect.bisect(self._firsts, address) - 1
        if at < 0 or address + x.nbytes > self._segments[at].last or not x.nbytes:
            return None
        return self._segments[at], address - self._segments[at].first

    # ------------------------------------------------------------ collectives; `place` is what find() has returned

    def all_reduce(self, x, place, op):
        """Each rank reduces its slice of x over all ranks, in tree order, and writes the result to all. A Request."""
        segment, offset = place
        first, last = cut(x.size, self.rank, self.size, GRAIN)
        slices = segment.views(offset + first * x.itemsize, last - first, x.dtype)
        return Request(self, lambda: self._reduce_blocks(slices, slices, op))

    def reduce_scatter(self, out, x, place, op):
        """Each rank reduces its N-th of x over all ranks into its out; x lies in the window. A Request."""
        segment, offset = place
        slices = segment.views(offset + self.rank * out.nbytes, out.size, x.dtype)
        return Request(self, lambda: self._reduce_blocks(slices, [out.reshape(-1)], op))

    def all_gather(self, out, place, x):
        """Each rank writes x to its N-th of every rank's out; out lies in the window. A Request."""
        segment, offset = place
        slots = segment.views(offset + self.rank * x.nbytes, x.size, x.dtype)
        if _address(x) == _address(slots[self.rank]):
            slots = slots[:self.rank] + slots[self.rank + 1:]   # x is its own slot already

        def write():
            for slot in slots:
                np.copyto(slot, x.reshape(-1))
        return Request(self, write)

    def barrier(self):
        """Return when all ranks have come here."""
        number = self.post()
        spins = 0
        while not self._all(POSTED, number):
            spins = self._pause(spins)
        self._fence()

    def _reduce_blocks(self, sources, outs, op):
        combine, count = OPS[op], outs[0].size
        block = BLOCK_BYTES // outs[0].itemsize
        for first in range(0, count, block):
            parts = [source[first:first + block] for source in sources]
            result = outs[0][first:first + block]
            tree_reduce(parts, combine, out=result)
            if op == "mean":
                np.divide(result, self.size, out=result)
            for out in outs[1:]:
                out[first:first + block] = result

    # ------------------------------------------------------------ meeting

    def post(self):
        """Make visible that this rank has reached its next operation; the operation's number."""
        self._posted += 1
        self._fence()
        self._mine[POSTED] = self._posted
        return self._posted

    def progress(self, number):
        """Do what can be done without waiting; True once operation `number` and all before it are finished."""
        pending = self._pending
        while pending and pending[0].number <= number:
            oldest = pending[0]
            if oldest.work is not None:
                if not self._all(POSTED, oldest.number):
                    return False
                self._fence()
                oldest.work()
                oldest.work = None
                self._fence()
                self._mine[FINISHED] = oldest.number
            if not self._all(FINISHED, oldest.number):
                return False
            self._fence()
            pending.popleft()
        return True

    def _all(self, word, number):
        for line in self._others:
            if line[word] < number:
                return False
        return True

    def _pause(self, spins):
        if spins >= self._spins:
            give_way()
        return spins + 1

    def _fence(self):
        if not ORDERED_STORES:
            self.engine.fence()


class Request:
    """An operation posted in the window; `work()` is this rank's part of it, run when all ranks have posted."""

    def __init__(self, window, work):
        self.window, self.work = window, work
        self.number = window.post()
        window._pending.append(self)

    def test(self):
        """True once finished; never waits."""
        return self.window.progress(self.number)

    def wait(self, timeout=None):
        """Finish it. False if that took more than `timeout` seconds."""
        window, spins = self.window, 0
        limit = None if timeout is None else time.monotonic() + timeout
        while not window.progress(self.number):
            spins = window._pause(spins)
            if limit is not None and time.monotonic() > limit:
                return False
        return True
