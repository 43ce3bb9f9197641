"""The node's shared window: arrays that all ranks of a node can read and write, and the collectives on them.

Each rank has a line of words that only it writes:

    POSTED    number of the last collective that it has reached: its input is ready, its output may be written
    FINISHED  number of the last collective of which it has done its part
    slots     the fingerprints of its last 1,024 collectives (comm/mismatch.py)
    TOLD      number of the collective that its text is about: what it has called there, and from where

All ranks call the same collectives in the same order, so a number means the same one everywhere:

    rank 0   POSTED=7 ...... all POSTED >= 7?  reduce my slice, write it to all   FINISHED=7   all FINISHED >= 7?
    rank 1        POSTED=7 . all POSTED >= 7?  reduce my slice, write it to all      FINISHED=7   all FINISHED >= 7?

Posting is a store or two, so a collective can be posted from a gradient hook and done later. Those that MPI runs are
numbered and checked here too: they differ from those of the window in that nobody waits for FINISHED.
"""

import bisect
import collections
import os
import platform
import time
import weakref

import numpy as np

from . import mismatch
from .memory import Segment, address, map_together
from .reduction import OPS, cut, tree_reduce
from .state import state
from .where import caller

POSTED, FINISHED, TOLD = 0, 1, 2
SLOTS, FIRST_SLOT = 1024, 16
TEXT = 8 * (FIRST_SLOT + SLOTS)     # the byte at which the text begins
LINE_BYTES = TEXT + mismatch.TEXT_BYTES
TELL_SECONDS = 2          # for the others to say what they have called

GRAIN = 16                # slices begin on multiples of 16 elements: whole cache lines from 4-byte elements up
BLOCK_BYTES = 128 << 10   # a slice is reduced in blocks that stay in the cache between being summed and being copied
SPINS = 200               # looks at the others' flags before the core is offered to somebody else

PROGRESS_EVERY = 256      # looks, between two in which MPI gets on with what it has been given

ORDERED_STORES = platform.machine() in ("x86_64", "AMD64")   # a store becomes visible after those before it
give_way = getattr(os, "sched_yield", lambda: time.sleep(0))


def cores():
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


class Window:
    """The shared window of a communicator whose ranks all run on one node; `engine` is its MPI engine.

    Where they run on several nodes: comm/nodes.py.
    """

    keeps_tree = True    # sums are those of the balanced tree in rank order
    remembers = True     # reductions can be Repeated
    across = 0           # nodes besides this rank's

    @classmethod
    def open(cls, engine, name):
        """The window, or None (on all ranks) where the ranks share no memory. Collective."""
        lines = map_together(engine, LINE_BYTES)
        return None if lines is None else cls(engine, name, lines)

    def __init__(self, engine, name, lines):
        self.engine, self.rank, self.size, self.name = engine, engine.rank, engine.size, name
        self.checked = mismatch.wanted()
        self._lines = lines
        words = [line.cast("Q") for line in lines]
        self._mine, self._others = words[self.rank], [line for i, line in enumerate(words) if i != self.rank]
        self._posted = self._verified = 0      # collectives posted by this rank, and found to be the same on all
        self._keys = [None] * SLOTS            # (key, place) of the last ones posted
        self._error = None
        self.pending = collections.deque()    # requests that it hasn't finished, oldest first
        self._spins = SPINS if self.size <= cores() else 0
        self._firsts, self._segments, self._made = [], [], 0    # sorted by address; how many were made in all
        self._scratch = np.empty(((self.size - 1).bit_length() - 1 if self.size > 1 else 0, BLOCK_BYTES), np.uint8)

    # ------------------------------------------------------------ memory

    def empty(self, shape, dtype):
        """A zeroed array in the window, or None on all ranks where memory is short. Collective."""
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        parts = self._map(nbytes)
        if parts is None:
            return None
        mine = np.frombuffer(parts[self.rank], np.uint8)
        self._made += 1
        self._register(Segment(parts, mine, self._made), mine)
        return mine.view(dtype).reshape(shape)

    def _map(self, nbytes):
        return map_together(self.engine, nbytes)

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
        first = address(x)
        at = bisect.bisect(self._firsts, first) - 1
        if at < 0 or first + x.nbytes > self._segments[at].last or not x.nbytes:
            return None
        return self._segments[at], first - self._segments[at].first

    # ------------------------------------------------------------ collectives; `place` is what find() has returned.
    # Each returns what this rank has to do once all have posted: a function, which returns None when it is through, or
    # what is left to wait for.

    def all_reduce(self, x, place, op, exact=False):
        """Each rank reduces its slice of x over all ranks, in tree order (exact or not), and writes the result to all.
        """
        slices = self.own_slices(x, place)
        return lambda: self.add_up(self.blocks(slices, slices), op)

    def reduce(self, x, place, dst, op):
        """Each rank reduces its slice of x over all ranks, in tree order, and writes the result to rank dst's x."""
        slices = self.own_slices(x, place)
        return lambda: self.add_up(self.blocks(slices, [slices[dst]]), op)

    def own_slices(self, x, place):
        segment, offset = place
        first, last = cut(x.size, self.rank, self.size, GRAIN)
        return segment.views(offset + first * x.itemsize, last - first, x.dtype)

    def reduce_scatter(self, out, x, place, op):
        """Each rank reduces its N-th of x over all ranks into its out; x lies in the window."""
        segment, offset = place
        slices = segment.views(offset + self.rank * out.nbytes, out.size, x.dtype)
        return lambda: self.add_up(self.blocks(slices, [out.reshape(-1)]), op)

    def all_gather(self, out, place, x):
        """Each rank writes x to its N-th of every rank's out; out lies in the window."""
        segment, offset = place
        slots = segment.views(offset + self.rank * x.nbytes, x.size, x.dtype)
        if address(x) == address(slots[self.rank]):
            slots = slots[:self.rank] + slots[self.rank + 1:]   # x is its own slot already

        def write():
            for slot in slots:
                np.copyto(slot, x.reshape(-1))
        return write

    def sent(self, x):
        """(bytes that this rank sends in an all-reduce of x, those of them that go to another node)."""
        first, last = cut(x.size, self.rank, self.size, GRAIN)
        return 2 * (self.size - 1) * (last - first) * x.itemsize, 0

    def blocks(self, sources, outs):
        """What is to be added up, one block after the other: (parts, result, its copies, arrays for partial sums)."""
        whole, *others = outs
        length, first_byte = BLOCK_BYTES // whole.itemsize, address(whole)
        own = next((i for i, source in enumerate(sources) if address(source) == first_byte), None)
        between = [row.view(whole.dtype) for row in self._scratch]
        for first in range(0, whole.size, length):
            last = min(first + length, whole.size)
            parts = [source[first:last] for source in sources]
            yield (parts, whole[first:last] if own is None else parts[own], [out[first:last] for out in others],
                   between if last - first == length else [row[:last - first] for row in between])

    def add_up(self, blocks, op):
        """Reduce each block in tree order, and copy the result to where it belongs."""
        combine, mean = OPS[op], op == "mean"
        for parts, result, copies, between in blocks:
            tree_reduce(parts, combine, result, between)
            if mean:
                np.divide(result, self.size, out=result)
            for copy in copies:
                np.copyto(copy, result)

    # ------------------------------------------------------------ meeting

    def post(self, key, place=None):
        """Make visible that this rank has come to its next collective; its number.

        key: what it means by it (comm/mismatch.py). place: the user's line, for a call that isn't waited for now.
        RuntimeError where so many are posted that one would take the slot of another that hasn't been compared yet.
        """
        if self._error is not None:
            raise self._error
        number = self._posted + 1
        if self.checked:
            if number - self._verified > SLOTS:
                raise RuntimeError(f"{key[0]} on {self.name!r}: {SLOTS:,} collectives are posted, and none of them was "
                                   "waited for; the check that all ranks mean the same ones remembers no more: wait "
                                   "for some of them before the next")
            slot = number % SLOTS
            self._keys[slot] = key, place
            self._mine[FIRST_SLOT + slot] = (number & 0xFFFF) << mismatch.FINGERPRINT_BITS | mismatch.fingerprint(key)
        self._posted = number
        self._fence()
        self._mine[POSTED] = number
        return number

    def arrived(self, number):
        """True once all ranks have come to collective `number`. MismatchError if they mean different ones."""
        for line in self._others:
            if line[POSTED] < number:
                return False
        self._fence()
        if self._verified < number:
            self._verify(number)
        return True

    def meet(self, number):
        """Return when all ranks have come to collective `number`. MismatchError if they mean different ones."""
        spins = 0
        while not self.arrived(number):
            spins = self.pause(spins)

    def late(self, number=None):
        """World ranks of this node that haven't come to collective `number` (None: the last one posted here)."""
        number = self._posted if number is None else number
        return [self.engine.world_ranks[i] for i, line in enumerate(self._lines) if line.cast("Q")[POSTED] < number]

    def _verify(self, number):
        """Compare the fingerprints of all collectives up to `number` that haven't been compared yet.

        A rank may be ahead, and post into the slot what comes SLOTS calls later, having compared this one itself. That
        is no mismatch: the upper bits of the word, which hold the call's number, tell it.
        """
        numbers = range(self._verified + 1, number + 1) if self.checked else ()
        for n in numbers:
            slot = FIRST_SLOT + n % SLOTS
            mine = self._mine[slot]
            for line in self._others:
                theirs = line[slot]
                if theirs != mine and (theirs ^ mine) >> mismatch.FINGERPRINT_BITS == 0:
                    self._error = self._mismatch(n)
                    raise self._error
        self._verified = number

    def _mismatch(self, number):
        """Say what this rank has called, hear what the others have, and make the error of it all."""
        key, place = self._keys[number % SLOTS]
        text = mismatch.describe(key, place or caller()).encode()[:mismatch.TEXT_BYTES]
        self._lines[self.rank][TEXT:TEXT + len(text)] = text
        self._fence()
        self._mine[TOLD] = number
        limit = time.monotonic() + TELL_SECONDS
        while any(line[TOLD] != number for line in self._others) and time.monotonic() < limit:
            give_way()
        self._fence()
        told = [bytes(line[TEXT:]).rstrip(b"\0").decode(errors="replace") if line.cast("Q")[TOLD] == number else None
                for line in self._lines]
        return mismatch.error(self.name, number, told)

    def progress(self, number):
        """Do what can be done without waiting; True once operation `number` and all before it are finished."""
        if self._error is not None:
            raise self._error
        pending = self.pending
        while pending and pending[0].number <= number:
            oldest = pending[0]
            if not oldest.done:
                if not oldest.began and not self.arrived(oldest.number):
                    return False
                if not oldest.do():
                    return False
                self.finish(oldest.number)
            if not self.finished(oldest.number):
                return False
            pending.popleft()
        return True

    def broke_off(self, number, error):
        """This rank has done its part of collective `number` by halves: it can't go on, for the others wait for it."""
        self._error = RuntimeError(f"{error!r} broke off this rank's part of collective number {number} of "
                                   f"{self.name!r}, which can't be used any more: the other ranks wait for that part")

    def finish(self, number):
        """Make visible that this rank has done its part of collective `number`."""
        self._fence()
        self._mine[FINISHED] = number

    def finished(self, number):
        """True once all ranks have done their parts."""
        for line in self._others:
            if line[FINISHED] < number:
                return False
        self._fence()
        return True

    def pause(self, spins):
        """Between two looks at the others' flags: let others run, and MPI hand out what they may be waiting for."""
        if spins >= self._spins:
            give_way()
        if spins % PROGRESS_EVERY == PROGRESS_EVERY - 1:
            self.engine.make_progress()
        return spins + 1

    def _fence(self):
        if not ORDERED_STORES:
            self.engine.fence()


class Repeated:
    """The all-reduce of one array, worked out once: what is left is to post, to wait, to add and to wait.

    Of 4 KiB on two ranks the addition takes a tenth of the time, and finding out what to add to what a third.
    """

    __slots__ = ("window", "dtype", "shape", "slices", "blocks", "op", "call", "key", "reference")

    def __init__(self, window, x, place, op, call, key):
        self.window, self.dtype, self.shape, self.op, self.call, self.key = window, x.dtype, x.shape, op, call, key
        self.slices, self.blocks = window.own_slices(x, place), None

    def fits(self, x):
        """Whether the array is still what it was."""
        return x.shape == self.shape and x.dtype is self.dtype and x.flags.writeable

    def post(self):
        """Post it: a Request."""
        return Request(self.window, self.window.post(self.key, caller()), self.add_up)

    def add_up(self):
        """This rank's part."""
        if self.blocks is None:     # here and not before: an array may come only once
            self.blocks = list(self.window.blocks(self.slices, self.slices))
        self.window.add_up(self.blocks, self.op)

    def run(self):
        """Do it at once; nothing posted may be left to be finished first."""
        window, spins = self.window, 0
        state.enter(self.call)
        try:
            number = window.post(self.key)
            try:
                while not window.arrived(number):
                    spins = window.pause(spins)
            except BaseException:       # the others wait for this part: it is done before what comes next
                Request(window, number, self.add_up)
                raise
            try:
                self.add_up()
            except BaseException as error:
                window.broke_off(number, error)
                raise
            window.finish(number)
            while not window.finished(number):
                spins = window.pause(spins)
        finally:
            state.leave()


class Request:
    """A collective posted in the window; `work()` is this rank's part of it, run when all ranks have posted."""

    def __init__(self, window, number, work):
        self.window, self.number, self.work, self.left = window, number, work, None
        self.began = self.done = False
        window.pending.append(self)

    def do(self):
        """Do this rank's part, as far as it can be done without waiting; True once it is done."""
        try:
            if not self.began:
                self.began, self.left = True, self.work()
            self.done = self.left is None or self.left.test()
        except BaseException as error:
            self.window.broke_off(self.number, error)
            raise
        if self.done:
            self.work = self.left = None   # they hold arrays
        return self.done

    def test(self):
        """True once finished; never waits."""
        return self.window.progress(self.number)

    def wait(self, timeout=None):
        """Finish it. False if that took more than `timeout` seconds."""
        window, spins = self.window, 0
        limit = None if timeout is None else time.monotonic() + timeout
        while not window.progress(self.number):
            spins = window.pause(spins)
            if limit is not None and time.monotonic() > limit:
                return False
        return True
