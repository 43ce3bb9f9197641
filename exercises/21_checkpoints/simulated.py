"""A disk that the power can leave: what of a program's calls is still there afterwards.

A file's bytes are safe when it has been synced, a folder's names when the folder has. What isn't safe may be there or
not, and of several changes any may be there without the others:

    names    of the creations, renamings and removals since fsync_folder any selection has happened; each by itself
             happens as a whole, or doesn't
    bytes    a file that was changed since its fsync has its old bytes, or none, or a first part of the new ones, or as
             many zeros, or all

Source: T. S. Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014, tables 1 and 3.
"""

import itertools

MOST = 4        # changes of names of which all selections are tried; of more the first few, all but one, and one alone


class File:
    """now: its bytes; safe: those at its last fsync."""

    def __init__(self, data=b""):
        self.now = self.safe = data


class Disk:
    """A folder of files, {name: bytes} at first, all safe. `after` is called with the disk after each call that changes
    anything, and `calls` has them as text."""

    def __init__(self, files=None, after=None):
        self._now = {name: File(data) for name, data in (files or {}).items()}
        self._safe, self._changes = dict(self._now), []     # [(the call, {name: File}, [names that are gone])]
        self._after, self.calls = after or (lambda disk: None), []

    def list(self):
        """The names of all files, in order."""
        return sorted(self._now)

    def read(self, name):
        """Its bytes. FileNotFoundError."""
        return self._file(name).now

    def create(self, name):
        """An empty file. One of this name that is there is emptied, and stays the same file."""
        if not isinstance(name, str):
            raise TypeError(f"disk.create({name!r}): a name is a string")
        if name in self._now:
            self._now[name].now = b""
        else:
            self._now[name] = File()
            self._changes.append((f"create({name})", {name: self._now[name]}, []))
        self._did(f"create({name})")

    def write(self, name, data):
        """Bytes behind those that it has. FileNotFoundError."""
        if not isinstance(data, bytes | bytearray | memoryview):
            raise TypeError(f"disk.write({name!r}, …): bytes are wanted, not a {type(data).__name__}")
        self._file(name).now += bytes(data)
        self._did(f"write({name}, {len(data)} bytes)")

    def fsync(self, name):
        """Returns when the file's bytes are safe. FileNotFoundError."""
        file = self._file(name)
        file.safe = file.now
        self._did(f"fsync({name})")

    def rename(self, old, new):
        """The file gets another name; one that had that name is gone. FileNotFoundError."""
        file = self._file(old)
        del self._now[old]
        self._now[new] = file
        self._changes.append((f"rename({old}, {new})", {new: file}, [old] * (old != new)))
        self._did(f"rename({old}, {new})")

    def remove(self, name):
        """FileNotFoundError."""
        self._file(name)
        del self._now[name]
        self._changes.append((f"remove({name})", {}, [name]))
        self._did(f"remove({name})")

    def fsync_folder(self):
        """Returns when all names are safe: the creations, renamings and removals until now."""
        self._safe, self._changes = dict(self._now), []
        self._did("fsync_folder()")

    def _file(self, name):
        if name not in self._now:
            raise FileNotFoundError(f"there is no file {name!r} on the disk")
        return self._now[name]

    def _did(self, call):
        self.calls.append(call)
        self._after(self)

    # ------------------------------------------------------------ the power fails

    def crashes(self):
        """[({name: bytes} that may be found, what was lost: text)], the simplest first."""
        names, found = self._names(), {}
        few = [pair for pair in names if len(pair[1]) < 2]
        for entries, lost in [(names[0])] + few[1:] + names:
            for how, texts in self._bytes(entries, all_kinds=(entries, lost) in few):
                state = {name: how(file) for name, file in entries.items()}
                found.setdefault(tuple(sorted(state.items())), (state, lost + texts))
        return sorted(found.values(), key=lambda pair: len(pair[1]))

    def worst(self):
        """{name: bytes} if all that isn't safe is lost."""
        return {name: file.safe for name, file in self._safe.items()}

    def _names(self):
        """[({name: File}, [changes that were lost])]: first that with all changes."""
        n = len(self._changes)
        every = range(n)
        if n <= MOST:
            kept = [set(some) for size in range(n, -1, -1) for some in itertools.combinations(every, size)]
        else:
            kept = [set(every), *({*every} - {i} for i in every), *(set(range(i)) for i in every),
                    *({i} for i in every)]
        found = []
        for chosen in kept:
            entries = dict(self._safe)
            for i, (_, new, gone) in enumerate(self._changes):
                if i in chosen:
                    for name in gone:
                        entries.pop(name, None)
                    entries |= new
            found.append((entries, [call for i, (call, _, _) in enumerate(self._changes) if i not in chosen]))
        return found

    @staticmethod
    def _bytes(entries, all_kinds):
        """[(File -> bytes, [what was lost of which file])]."""
        unsafe = {file: name for name, file in entries.items() if file.now != file.safe}
        found = [(lambda file: file.now, [])]
        kinds = {"lost": lambda file: file.safe}
        if all_kinds:
            kinds |= {"empty": lambda file: b"", "half": lambda file: file.now[:len(file.now) // 2],
                      "zeros": lambda file: bytes(len(file.now))}
        for kind, how in kinds.items():
            for one in unsafe:
                found.append((lambda file, one=one, how=how: how(file) if file is one else file.now,
                              [f"bytes of {unsafe[one]}: {kind}"]))
            if len(unsafe) > 1:
                found.append((lambda file, how=how: how(file) if file in unsafe else file.now,
                              [f"bytes of {name}: {kind}" for name in unsafe.values()]))
        return found
