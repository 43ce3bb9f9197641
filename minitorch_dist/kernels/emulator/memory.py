"""The memory that an emulated kernel sees: arrays at their addresses, each program's shared memory, each thread's own.

Every access is checked as a GPU or a sanitizer would: inside of an argument's array, at a multiple of its size. Shared
memory begins as NaN and knows who wrote and read what since the last barrier: two warps that touch the same bytes, one
of them writing, with no barrier between, are a race, though it may go well. What cp.async copies lands when it is
waited for, no earlier, and nobody may touch its bytes before.
"""

import ctypes
import math

import numpy as np
from numpy.lib.array_utils import byte_bounds

from .arithmetic import UNSIGNED

SECTOR = 32         # bytes: what memory is read and written in
SHARED_BASE = 1024  # the first address of shared memory; 0 is nobody's
SHARED_MOST = 1 << 18       # no program has more bytes of it; no array is there
LOCAL_BASE, LOCAL_MOST = 0xf0000000, 1 << 24    # of a thread's own memory: no array is there, and it fits 32 bits
NOBODY, SEVERAL = -1, -2


class Fault(Exception):
    """What a lane did wrong: (its number, words). The machine adds where."""


ALIGNED = 512       # bytes: where what CuPy allocates begins


def aligned(array):
    """A copy that begins where an array of CuPy's would, for counts like a GPU's."""
    room = np.empty(array.nbytes + ALIGNED, np.uint8)
    first = -room.ctypes.data % ALIGNED
    copy = room[first:first + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


class Region:
    """The bytes of an array, or of several that overlap, at their address, strides or not; which sectors of them have
    been read and written."""

    def __init__(self, arrays, name):
        self.arrays, self.name = arrays, name               # they are kept alive
        bounds = [byte_bounds(array) for array in arrays]
        self.start, self.end = min(start for start, _ in bounds), max(end for _, end in bounds)
        self.base = self.start // SECTOR * SECTOR
        size = math.ceil((self.end - self.base) / SECTOR) * SECTOR
        self.views = {width: np.frombuffer((ctypes.c_uint8 * size).from_address(self.base), dtype)
                      for width, dtype in UNSIGNED.items()}
        self.read, self.written = np.zeros(size // SECTOR, bool), np.zeros(size // SECTOR, bool)
        self.writable = all(array.flags.writeable for array in arrays)


class GlobalMemory:
    """Arrays, found by the address that they have in this process."""

    def __init__(self, arrays):
        """arrays: {name: array}. Where they overlap, as views of one do, they are one region."""
        groups = []
        for name, array in sorted(arrays.items(), key=lambda item: byte_bounds(item[1])):
            if array.size and groups and byte_bounds(array)[0] < groups[-1][2]:
                names, together, end = groups.pop()
                groups.append((names + [name], together + [array], max(end, byte_bounds(array)[1])))
            elif array.size:
                groups.append(([name], [array], byte_bounds(array)[1]))
        regions = [Region(together, " and ".join(names)) for names, together, _ in groups]
        order = list(arrays)        # as they were given, which is as people know them
        self.regions = sorted(regions, key=lambda region: order.index(region.name.partition(" and ")[0]))

    def add(self, region):
        self.regions.append(region)

    def include(self, arrays):
        """Add those arrays, {name: array}, that aren't there: what a kernel's text keeps in memory."""
        for name, array in arrays.items():
            if not any(region.start <= array.ctypes.data < region.end for region in self.regions):
                self.add(Region([array], name))

    def parts(self, addresses, size, lanes, verb):
        """[(region, which of the addresses are in it, or None for all)]. Fault where one is nowhere."""
        if (addresses % size).any():
            worst = int(np.flatnonzero(addresses % size)[0])
            raise Fault(lanes[worst], f"{verb} {size} bytes at {int(addresses[worst]):#x}, no multiple of {size}")
        low, high = int(addresses.min()), int(addresses.max()) + size
        for region in self.regions:
            if region.start <= low and high <= region.end:
                return [(region, None)]
        found, rest = [], np.ones(len(addresses), bool)
        for region in self.regions:
            inside = rest & (addresses >= region.start) & (addresses + np.uint64(size) <= region.end)
            if inside.any():
                found.append((region, np.flatnonzero(inside)))
                rest &= ~inside
        if rest.any():
            worst = int(np.flatnonzero(rest)[0])
            at = int(addresses[worst])
            raise Fault(lanes[worst], f"{verb} {size} bytes at {at:#x}, {self.near(at)}")
        return found

    def near(self, address):
        """Where an address that no array has is, for people."""
        if not self.regions:
            return "and there is no array"
        region = min(self.regions, key=lambda region: max(region.start - address, address - region.end))
        if address < region.start:
            return f"{region.start - address:,} bytes before {region.name}, which has {region.end - region.start:,}"
        return f"{address - region.start:,} bytes into {region.name}, which has {region.end - region.start:,}"

    def load(self, addresses, width, count, lanes):
        """[values, …]: `count` unsigned numbers of `width` bytes per lane, side by side."""
        parts = self.parts(addresses, width * count, lanes, "reads")
        out = [np.empty(len(addresses), UNSIGNED[width]) for _ in range(count)]
        for region, which in parts:
            offset = (addresses if which is None else addresses[which]) - np.uint64(region.base)
            region.read[offset // SECTOR] = True
            index = (offset // np.uint64(width)).astype(np.intp)
            for i in range(count):
                value = region.views[width][index + i]
                if which is None:
                    out[i] = value
                else:
                    out[i][which] = value
        return out

    def store(self, addresses, width, values, lanes):
        for region, which in self.parts(addresses, width * len(values), lanes, "writes"):
            if not region.writable:
                lane = lanes[0 if which is None else which[0]]
                raise Fault(lane, f"writes to {region.name}, an array that is read-only")
            offset = (addresses if which is None else addresses[which]) - np.uint64(region.base)
            region.written[offset // SECTOR] = True
            index = (offset // np.uint64(width)).astype(np.intp)
            for i, value in enumerate(values):
                region.views[width][index + i] = value if which is None else value[which]


    def exchange(self, addresses, dtype, change, lanes):
        """What was there, changed as by one instruction. change: numbers -> numbers."""
        before, = self.load(addresses, dtype.itemsize, 1, lanes)
        self.store(addresses, dtype.itemsize, [change(before.view(dtype)).view(before.dtype)], lanes)
        return before


class LocalMemory:
    """What each lane has for itself: a row of bytes, which begin as NaN. All lanes' rows have the same addresses."""

    def __init__(self, lanes, size):
        self.size, self.row = size, math.ceil(size / 16) * 16
        row_bytes = np.full(lanes * self.row, 0xff, np.uint8)
        self.views = {width: row_bytes.view(dtype) for width, dtype in UNSIGNED.items()}

    def places(self, addresses, size, lanes, verb):
        """Indices into all rows."""
        offsets = addresses - np.uint64(LOCAL_BASE)         # of lower addresses it is huge
        wrong = (offsets > max(self.size - size, -1) % (1 << 64)) | (offsets % size != 0)
        if wrong.any():
            worst = int(np.flatnonzero(wrong)[0])
            raise Fault(lanes[worst], f"{verb} {size} bytes at {int(addresses[worst]) - LOCAL_BASE} of a thread's "
                                      f"{self.size} bytes of memory of its own")
        return lanes * self.row + offsets.astype(np.int64)

    def load(self, addresses, width, count, lanes):
        places = self.places(addresses, width * count, lanes, "reads") // width
        return [self.views[width][places + i] for i in range(count)]

    def store(self, addresses, width, values, lanes):
        places = self.places(addresses, width * len(values), lanes, "writes") // width
        for i, value in enumerate(values):
            self.views[width][places + i] = value


class SharedMemory:
    """The shared memory of all programs of a batch, one row of bytes each.

    Who touched a byte since the program's last barrier is written down per byte: the warp, NOBODY, or SEVERAL; and
    whether all who wrote it did so by atomic instructions, which don't race with each other.
    """

    def __init__(self, programs, size, warps):
        self.size, self.row = size, max(16, math.ceil(size / 16) * 16)
        self.bytes = np.full(programs * self.row, 0xff, np.uint8)
        self.views = {width: self.bytes.view(dtype) for width, dtype in UNSIGNED.items()}
        self.warps = warps              # of a program
        self.writer = np.full(programs * self.row, NOBODY, np.int16)
        self.reader = np.full(programs * self.row, NOBODY, np.int16)
        self.arriving, self.atomic = np.zeros((2, programs * self.row), bool)

    def places(self, addresses, size, lanes, verb):
        """Indices into `bytes`."""
        inside = (addresses >= SHARED_BASE) & (addresses.astype(np.int64) + size <= SHARED_BASE + self.size)
        wrong = ~inside | (addresses % size != 0)
        if wrong.any():
            worst = int(np.flatnonzero(wrong)[0])
            raise Fault(lanes[worst], f"{verb} {size} bytes at {int(addresses[worst]) - SHARED_BASE} of a program's "
                                      f"{self.size} bytes of shared memory")
        return (lanes // (32 * self.warps)) * self.row + (addresses.astype(np.int64) - SHARED_BASE)

    def load(self, addresses, width, count, lanes):
        places = self.places(addresses, width * count, lanes, "reads")
        self.note_read(places, width * count, lanes)
        return [self.views[width][places // width + i] for i in range(count)]

    def store(self, addresses, width, values, lanes):
        places = self.places(addresses, width * len(values), lanes, "writes")
        given = np.ascontiguousarray(np.stack([np.broadcast_to(value, places.shape) for value in values], 1))
        self.write(places, given.view(np.uint8), lanes)

    def note_read(self, places, size, lanes):
        """Lanes read `size` bytes each."""
        warp, touched = self.who(places, size, lanes)
        self.check(self.writer[touched], warp, touched, lanes, "reads", "wrote")
        before = self.reader[touched]
        self.reader[touched] = np.where((before == NOBODY) | (before == warp), warp, SEVERAL)
        # Of several warps that read a byte by one instruction the last one is written down; the others see that.
        self.reader[touched[self.reader[touched] != warp]] = SEVERAL

    def write(self, places, given, lanes):
        """Lanes write bytes (lanes, size). Two warps that write the same to the same place do no harm."""
        warp, touched = self.who(places, given.shape[1], lanes)
        another = np.where(self.bytes[touched] == given, NOBODY, self.writer[touched])
        self.check(another, warp, touched, lanes, "writes", "wrote")
        self.check(self.reader[touched], warp, touched, lanes, "writes", "read")
        self.bytes[touched], self.writer[touched], self.atomic[touched] = given, warp, False
        another = np.where(self.bytes[touched] == given, NOBODY, self.writer[touched])      # by the same instruction
        self.check(another, warp, touched, lanes, "writes", "wrote")

    def exchange(self, addresses, dtype, change, lanes):
        """What one lane finds, changed as by one instruction. change: numbers -> numbers."""
        places = self.places(addresses, dtype.itemsize, lanes, "changes")
        warp, touched = self.who(places, dtype.itemsize, lanes)
        before = self.writer[touched]
        self.check(np.where(self.atomic[touched], NOBODY, before), warp, touched, lanes, "changes", "wrote")
        self.check(self.reader[touched], warp, touched, lanes, "changes", "read")
        self.atomic[touched] |= before == NOBODY
        self.writer[touched] = np.where((before == NOBODY) | (before == warp), warp, SEVERAL)
        view, index = self.views[dtype.itemsize], places // dtype.itemsize
        found = view[index]
        view[index] = change(found.view(dtype)).view(found.dtype)
        return found

    def who(self, places, size, lanes):
        """(warp of each lane in its program (lanes, 1), the bytes that it touches (lanes, size))."""
        return (lanes // 32 % self.warps).astype(np.int16)[:, None], places[:, None] + np.arange(size)

    def check(self, other, warp, touched, lanes, verb, did):
        """Fault where another warp touched a byte since the last barrier, or a copy to it is under way."""
        race, arriving = (other != NOBODY) & (other != warp), self.arriving[touched]
        if not (race.any() or arriving.any()):
            return
        lane, byte = np.argwhere(race | arriving)[0]
        place = int(touched[lane, byte] % self.row)
        if arriving[lane, byte]:
            raise Fault(lanes[lane], f"{verb} byte {place} of shared memory, to which cp.async still copies")
        who = "several warps" if other[lane, byte] == SEVERAL else f"warp {int(other[lane, byte])}"
        raise Fault(lanes[lane], f"{verb} byte {place} of shared memory, which {who} {did} with no barrier between: "
                                 "a race")

    def expect(self, addresses, size, lanes):
        """cp.async begins to write: its places."""
        places = self.places(addresses, size, lanes, "copies")
        warp, touched = self.who(places, size, lanes)
        for other, did in ((self.writer, "wrote"), (self.reader, "read")):
            self.check(other[touched], warp, touched, lanes, "copies to", did)
        self.writer[touched], self.atomic[touched] = warp, False
        self.check(self.writer[touched], warp, touched, lanes, "copies to", "wrote")        # by the same instruction
        self.arriving[touched] = True
        return places

    def arrive(self, places, values, lanes):
        """What was expected is there: values (lanes, bytes)."""
        warp, touched = self.who(places, values.shape[1], lanes)
        self.arriving[touched] = False
        self.bytes[touched], self.writer[touched] = values, warp

    def barrier(self, programs):
        """These programs (a mask, or None for all) have come to a barrier."""
        for who in (self.writer, self.reader):
            rows = who.reshape(-1, self.row)
            rows[slice(None) if programs is None else programs] = NOBODY
