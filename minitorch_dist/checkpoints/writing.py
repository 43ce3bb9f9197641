"""Writing a checkpoint: every rank its file, and a name when all of it is on disk."""

import errno
import json
import os
import shutil
import socket
import sys
import threading
import zlib

import numpy as np

from ..backend import STORED, to
from ..comm.together import gathered, together
from ..launch_env import launched_size
from .index import INDEX
from .layout import Place, piece_of

_started = {}       # {a folder that a thread of this process writes into, or did: its Saving}


class Saving:
    """A checkpoint on its way to the disk.

    path  where it will be; there is nothing before all ranks' files are on disk

    Without start, wait writes. After it a thread does, and whichever rank's thread is the last gives the folder its
    name: so the checkpoint is there whether or not somebody waits, and ranks that are training send no messages for it.
    They tell each other in the folder itself:

        rank 0   rank-0.safetensors ────▶ rank-0.done
        rank 1   rank-1.safetensors ──────────────▶ rank-1.done     all are done: it takes rank-0.done away, which only
                                                                    one rank can, and gives the folder index and name

    Source: for the idea of copying first and writing beside the training, Mohan et al. 2021, "CheckFreq".
    """

    def __init__(self, path, partial, index, comm, pieces):
        self.path, self._partial, self._index, self._comm, self._pieces = path, partial, index, comm, pieces
        self._rank, self._size = (comm.rank, comm.size) if comm else (0, 1)
        self._thread = self._facts = self._failure = None
        self._published = self._over = False
        self._written = threading.Event()   # (join, ended by Ctrl-C, takes a thread for done until Python 3.13)

    def start(self):
        """Write in a thread. The pieces must be copies."""
        for done in [partial for partial in _started if not is_being_written(partial)]:
            del _started[done]
        _started[os.path.abspath(self._partial)] = self
        self._thread = threading.Thread(target=self._run, name=f"writes {self.path.name}")
        try:
            self._thread.start()
        except RuntimeError as error:   # a limit on threads; the other ranks are writing, and hear of it when all wait
            self._fail(OSError(errno.EAGAIN, str(error), str(self.path)))
            self._written.set()

    def is_completed(self):
        """Whether this rank's part is done. Never blocks, and asks no other rank."""
        return self._over or self._written.is_set()

    def wait(self):
        """Return when the checkpoint is there. Collective. OSError on all ranks where one couldn't write: then there is
        nothing at `path`."""
        if not self._over:      # nor is it where Ctrl-C has ended an earlier wait
            try:
                self._finish()
            except Exception as error:
                self._failure = error
            self._over = True
        if self._failure is not None:
            raise self._failure

    def _finish(self):
        if self._thread is not None:
            self._written.wait()
        try:
            found = gathered(self._comm, (together(self._comm, self._result), self._published))
            # Without threads nobody has; and a network's file system may show the notes to none of them in time.
            publishes = self._rank == 0 and not any(published for _, published in found)
            self._index.files = {f"rank-{rank}.safetensors": facts for rank, (facts, _) in enumerate(found)}
            together(self._comm, lambda: publish(self._partial, self.path, self._index, self._comm)
                     if publishes else None)
        except Exception:
            if self._rank == 0:         # the room is wanted by others, perhaps
                shutil.rmtree(self._partial, ignore_errors=True)
            raise

    def _result(self):
        """The facts of this rank's file, which is on disk."""
        if self._thread is None:
            self._write()
        if self._failure is not None:
            raise self._failure
        return self._facts

    def _write(self):
        check_seen(self._partial, self._rank)
        self._facts = write(self._partial / f"rank-{self._rank}.safetensors", blocks(self._pieces))
        self._pieces = None

    def _run(self):
        """What the thread does."""
        try:
            self._write()
            note = self._partial / f"rank-{self._rank}.done"
            write(note.with_suffix(".note"), [json.dumps(self._facts).encode()])
            os.rename(note.with_suffix(".note"), note)
            files = self._notes()
            if files is not None:
                self._index.files = files
                publish(self._partial, self.path, self._index, self._comm)
                self._published = True
        except BaseException as error:      # wait raises it
            self._fail(error)
        finally:
            self._written.set()

    def _fail(self, error):
        self._failure, self._pieces = error, None
        print(f"rank {self._rank}: {self.path} couldn't be written, and the checkpoints before it stay: {error}",
              file=sys.stderr, flush=True)

    def _notes(self):
        """{file: its facts} of all ranks, on the one that is to publish them; None on others."""
        try:
            found = {f"rank-{rank}.safetensors": json.loads((self._partial / f"rank-{rank}.done").read_bytes())
                     for rank in range(self._size)}
            (self._partial / "rank-0.done").unlink()
        except FileNotFoundError:       # some aren't done yet, or another rank was faster
            return None
        return found


def copied(pieces):
    """The same {key: (array, box, place)} of arrays in the host's memory that nobody changes."""
    found = {}
    for name, (array, box, place) in pieces.items():
        part = piece_of(array, place)
        part = part.copy() if isinstance(part, np.ndarray) else to(part, "cpu")
        found[name] = part, box, Place(...)
    return found


def on_host(array):
    """Its elements, one after another in C order, little-endian, as bytes."""
    array = np.ascontiguousarray(to(array, "cpu")).reshape(-1)
    return array.astype(array.dtype.newbyteorder("<"), copy=False).view(np.uint8)


def is_being_written(partial):
    """Whether ranks' threads may still write into the folder, of which rank 0 was told by `start`."""
    saving = _started.get(os.path.abspath(partial))
    return (saving is not None and not saving._over and saving._failure is None) and os.path.exists(partial)


def begin(path, partial, comm):
    """Make room, and take away what a save that was broken off has left."""
    if path.exists():
        raise there_already(path, comm)
    if is_being_written(partial):
        raise FileExistsError(errno.EEXIST, "a checkpoint is being written here: wait for it", str(path))
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)


def check_seen(folder, rank):
    """OSError where this rank doesn't see a folder that rank 0 has made. (One of another disk, by the same name, is
    found by publish.)"""
    if not folder.is_dir():
        raise OSError(errno.ENOENT, f"rank {rank} on {socket.gethostname()} doesn't see this folder, which rank 0 has "
                                    "made: all ranks write into it, so it must be one that all machines share",
                      str(folder))


def there_already(path, comm):
    """The error for a checkpoint that is in the way. comm: who is writing."""
    alone = f", perhaps another rank's: {launched_size()} ranks write one together where they are given comm=" \
        if comm is None and launched_size() > 1 else ""
    return FileExistsError(errno.EEXIST, f"there is a checkpoint already{alone}", str(path))


def blocks(pieces):
    """The bytes of a file of safetensors with pieces {key: (array, box, place)}: a header, then the arrays one by
    one."""
    order = sorted(pieces.items(), key=lambda piece: -piece[1][0].dtype.itemsize)     # so that all are aligned
    header, at = {}, 0
    for name, (array, box, _) in order:
        shape = [stop - start for start, stop in box]
        end = at + int(np.prod(shape, dtype=np.int64)) * array.dtype.itemsize
        header[name] = {"dtype": STORED[array.dtype.name], "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, (array, _, place) in order:
        yield on_host(piece_of(array, place))


def write(path, blocks):
    """A file that is on disk when this returns: {"bytes", "crc32"}."""
    count, crc32 = 0, 0
    try:
        with open(path, "wb") as file:
            for block in blocks:
                file.write(block)
                count, crc32 = count + len(block), zlib.crc32(block, crc32)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:    # writing says nothing of the file
        raise OSError(error.errno, error.strerror, str(path)) from None
    return {"bytes": count, "crc32": crc32}


def publish(partial, path, index, comm):
    """All ranks' files are on disk: give them their index, and the folder its name."""
    for note in partial.glob("rank-*.done"):
        note.unlink()
    for name, facts in index.files.items():
        size = (partial / name).stat().st_size if (partial / name).is_file() else None
        if size != facts["bytes"]:
            raise OSError(errno.EIO, f"{name} has {size} of {facts['bytes']} bytes when seen from rank 0: the folder "
                                     "must be one that all nodes share", str(partial))
    write(partial / INDEX, [index.text().encode()])
    sync(partial)
    try:
        os.rename(partial, path)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):      # since begin(): another group of ranks
            raise there_already(path, comm) from None
        raise
    sync(path.parent)


def sync(folder):
    """Have a folder's entries on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
