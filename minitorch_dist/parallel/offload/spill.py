"""Files without a name: memory on disk that goes with the process, however that ends.

A file is opened and its name taken away at once, so that the kernel frees it as soon as nobody has it open: after the
last array, after an exception, after kill -9.
"""

import errno
import mmap
import os
import shutil
import sys
import tempfile
import weakref
from bisect import bisect_left
from collections import deque
from pathlib import Path

from ...backend import xp


def nameless_file(folder):
    """An open file without a name in `folder`. FileNotFoundError, or another OSError, where that can't be."""
    try:
        return tempfile.TemporaryFile(dir=folder, buffering=0)
    except OSError as error:
        raise type(error)(error.errno, f"offload: no file can be made in this folder ({error.strerror}); give one that "
                          "exists, on a disk with room", str(folder)) from None


def refused(error, folder, nbytes, doing="written"):
    """An OSError that says how much was to be written, and how much room there is."""
    free = shutil.disk_usage(folder).free if Path(folder).is_dir() else 0
    number, why = (error.errno, error.strerror) if isinstance(error, OSError) else (errno.EIO, str(error))
    return OSError(number, f"offload: {nbytes:,} bytes can't be {doing} here ({why}), where {free:,} are free: make "
                   "room or give another folder", str(folder))


def read_into(file, offset, memory, what):
    """Fill a 1-d uint8 array from a file (a descriptor). OSError, naming `what`, where the file ends before."""
    at, view = 0, memoryview(memory)
    while at < len(view):
        count = os.preadv(file, [view[at:]], offset + at)
        if not count:
            raise OSError(f"{what} ends {len(view) - at:,} bytes too early: it was cut off since it was written")
        at += count


class Spill:
    """One file without a name, in which stretches of bytes lie.

    folder  where; it must exist
    """

    def __init__(self, folder):
        self.folder = folder
        with nameless_file(folder) as file:
            self.file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.file)
        self.gaps = [(0, sys.maxsize)]      # [(first, last + 1 byte)] in order, no two side by side
        self.released = deque()             # the same, still to be joined

    def put(self, data):
        """Write a 1-d uint8 array of the host; returns its offset. OSError where the disk is full: the stretch is not
        there then, all others are."""
        while self.released:
            self.join(*self.released.popleft())
        i = next(i for i, (first, last) in enumerate(self.gaps) if last - first >= data.nbytes)
        (offset, last), at, view = self.gaps[i], 0, memoryview(data)
        try:
            while at < len(view):
                at += os.pwrite(self.file, view[at:], offset + at)
        except OSError as error:
            raise refused(error, self.folder, data.nbytes) from None
        self.gaps[i:i + 1] = [(offset + at, last)] if offset + at < last else []
        return offset

    def get(self, offset, memory):
        """Fill a 1-d uint8 array from an offset on. Another thread may do so."""
        read_into(self.file, offset, memory, f"the offload file in {self.folder}")

    def release(self, offset, nbytes):
        """What lies there is needed no more. At any time: the garbage collector may call it in the midst of put."""
        self.released.append((offset, offset + nbytes))

    def join(self, first, last):
        """Make a gap, one with those on both sides."""
        i = bisect_left(self.gaps, (first, last))
        if self.gaps[i][0] == last:
            last = self.gaps.pop(i)[1]
        if i and self.gaps[i - 1][1] == first:
            i, first = i - 1, self.gaps.pop(i - 1)[0]
        self.gaps.insert(i, (first, last))


def mapped(folder, values):
    """A copy of an array of the host, in a file of its own without a name, mapped into memory: the kernel reads and
    writes its pages. All room is taken at once: OSError where there isn't enough. Without elements it needs no file.
    """
    if not values.nbytes:
        return values.copy()
    with nameless_file(folder) as file:
        try:
            if hasattr(os, "posix_fallocate"):      # else a full disk shows as SIGBUS at the first touch
                os.posix_fallocate(file.fileno(), 0, values.nbytes)
            file.truncate(values.nbytes)
        except OSError as error:
            raise refused(error, folder, values.nbytes, "set apart") from None
        array = xp.frombuffer(mmap.mmap(file.fileno(), values.nbytes), values.dtype).reshape(values.shape)
    array[...] = values
    return array
