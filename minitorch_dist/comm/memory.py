"""Memory that all ranks of a node have mapped.

One file in memory is mapped by every rank; it holds one part per rank. It has no name (memfd_create): nothing can be
left behind, and a container's small /dev/shm doesn't limit it. The others open it through /proc. Where that can't be,
because ranks live in containers of their own or on another system, it is a file of /dev/shm whose name is removed as
soon as all have mapped it. Each rank unmaps its own mapping when its last array of it dies. Before Python 3.13 a
mapping keeps a file descriptor, of which a process may have 1,024 where `ulimit -n` says no more.
"""

import mmap
import os
import sys
import tempfile

import numpy as np

MESSAGE_BYTES = 512
FOLDER = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
WITHOUT_DESCRIPTOR = {"trackfd": False} if sys.version_info >= (3, 13) else {}


def map_together(engine, nbytes):
    """Zeroed memory that every rank of the engine has mapped, `nbytes` for each: a list of uint8 views, by rank.

    Collective. None on all ranks where one of them can't map it, for want of memory or because it sees neither the
    others' processes nor their /dev/shm. The mapping goes when the last of the views has gone.
    """
    stride = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = _map(engine, stride, _without_name) or _map(engine, stride, _with_name)
    if memory is None:
        return None
    return [memoryview(memory)[rank * stride:rank * stride + nbytes] for rank in range(engine.size)]


def _without_name():
    """(descriptor, path for the others, path to be removed)"""
    if not hasattr(os, "memfd_create"):
        raise OSError("only Linux has it")
    file = os.memfd_create("minitorch")
    return file, f"/proc/{os.getpid()}/fd/{file}", None


def _with_name():
    file, path = tempfile.mkstemp(prefix="minitorch_", dir=FOLDER)
    return file, path, path


def _map(engine, stride, create):
    """The mapping of a file that rank 0 creates, or None on all ranks."""
    message, file, name, memory = np.zeros(MESSAGE_BYTES, np.uint8), None, None, None
    try:
        if engine.rank == 0:
            file, path, name = create()
            os.ftruncate(file, stride * engine.size)
            text = f"{_identity(file)} {path}".encode()
            message[:len(text)] = np.frombuffer(text, np.uint8)
    except OSError:
        pass   # the message stays empty, the others can't open it, and all agree below
    engine.broadcast(message, 0)
    identity, _, path = message.tobytes().rstrip(b"\0").decode().partition(" ")
    try:
        if engine.rank != 0:
            if _identity(path) != identity:     # a process of that number, but another one: that of another container
                raise OSError(f"{path} is another file")
            file = os.open(path, os.O_RDWR)
        if _identity(file) != identity:     # it has ended since, and another one has its number
            raise OSError(f"{path} is another file")
        if hasattr(os, "posix_fallocate"):   # else a full memory shows as SIGBUS at the first touch
            os.posix_fallocate(file, engine.rank * stride, stride)
        memory = mmap.mmap(file, stride * engine.size, **WITHOUT_DESCRIPTOR)
    except (OSError, ValueError, TypeError):
        pass
    mapped = np.array([memory is not None], np.int32)
    engine.all_reduce(mapped, "min")
    if name is not None:
        os.unlink(name)
    if file is not None:
        os.close(file)
    return memory if mapped[0] else None


def _identity(file):
    """Of a descriptor or a path."""
    status = os.stat(file)
    return f"{status.st_dev}:{status.st_ino}"


def address(x):
    """Where a contiguous array begins."""
    return x.__array_interface__["data"][0]   # twice as fast as x.ctypes.data


class Segment:
    """The parts of all ranks of one mapping, and where this rank's own part lies in its address space.

    number  which mapping of its window it is; the same on all ranks
    """

    def __init__(self, parts, mine, number):
        self.number = number
        self.first, self.last = address(mine), address(mine) + mine.nbytes
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
