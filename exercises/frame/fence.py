"""What an answer may not do: a hook in the interpreter, which ends the process and leaves a note.

The answer runs in the same process, and can patch all that it finds there: os.path, builtins, child.py's names. So this
module is loaded by child.py alone, under no name, with builtins of its own; it goes by functions in C and by copies.
Nothing leads here but the garbage collector, which is closed, too. (ctypes, and who forges code by importlib's loaders,
get around it: docs/teaching.md.)
"""

import builtins
import importlib.util
import os
import stat
import types
from os import O_CREAT, O_WRONLY, _exit, getpid, listdir, readlink, write
from os import open as open_number
from sys import _getframe

SEPARATOR = "/"
NEVER = ("minitorch_dist", "mpi4py", "exercises", "solutions", "torch", "jax", "tensorflow", "autograd", "cupy",
         "triton")
STARTS_A_PROGRAM = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty")
TOUCHES_A_FILE = {     # event: how many paths it begins with
    **dict.fromkeys(("open", "os.remove", "os.truncate", "os.listdir", "os.scandir", "os.chmod", "os.rmdir"), 1),
    **dict.fromkeys(("os.rename", "os.link", "os.symlink"), 2)}
SENDS_A_SIGNAL = ("os.kill", "os.killpg")
LOOKS_AT_ALL_OBJECTS = ("gc.get_objects", "gc.get_referrers", "gc.get_referents")
MAKES_CODE = ("compile", "code.__new__")        # of a file that the second argument names
NUMBERS = "/proc/self/fd"


def forbidden(name, allow, forbid):
    """Whether an answer may not import the module: the longest of the three lists' entries that it lies in decides."""
    def inside(entry):
        return name == entry or name.startswith(entry + ".")
    refused = max((len(entry) for entry in (*NEVER, *forbid) if inside(entry)), default=0)
    return refused > max((len(entry) for entry in allow if inside(entry)), default=0) or name in forbid


def own_realpath():
    """os.path.realpath, of a module that nobody else has, on functions as they are now."""
    spec = importlib.util.find_spec("posixpath")
    paths = importlib.util.module_from_spec(spec)
    paths.__builtins__ = dict(vars(builtins))
    spec.loader.exec_module(paths)
    paths.os, paths.stat = types.SimpleNamespace(**vars(os)), types.SimpleNamespace(**vars(stat))
    return paths.realpath


realpath = own_realpath()


def text(name):
    """A name as a str, none of a subclass, whose methods would be the answer's."""
    return bytes.decode(name, "utf-8", "surrogateescape") if isinstance(name, bytes) else str.__str__(name)


def places(path):
    """The file that a path names. A relative one may begin at any folder that is open: the hook isn't told dir_fd."""
    yield realpath(path)
    if not path.startswith(SEPARATOR):
        for number in listdir(NUMBERS):
            try:
                folder = readlink(f"{NUMBERS}/{number}")
            except OSError:     # listdir's own
                continue
            if folder.startswith(SEPARATOR):
                yield realpath(f"{folder}/{path}")


class Fence:
    """Refuses imports, files, programs, signals and code that are none of an answer's business.

    note           the file that says which
    folders        files in these are closed, but for those in open_to_all
    trusted        who may do all of that: code of files whose names begin so
    allow, forbid  modules, see forbidden
    """

    def __init__(self, note, folders, open_to_all, trusted, allow, forbid):
        self.folders = tuple(folder + SEPARATOR for folder in folders)
        self.open_to_all, self.trusted, self.allow, self.forbid = open_to_all, trusted, allow, forbid
        self.note = open_number(note, O_WRONLY | O_CREAT)

    def watch(self, event, args):
        if event == "import":
            if forbidden(text(args[0]), self.allow, self.forbid) and not self.by_the_library():
                self.refuse(f"imports {text(args[0])}: this exercise is to be written without it")
        elif event in TOUCHES_A_FILE:
            for path in args[:TOUCHES_A_FILE[event]]:
                if isinstance(path, (str, bytes)) and not self.by_the_library():
                    for place in places(text(path)):
                        if (place + SEPARATOR).startswith(self.folders) and place not in self.open_to_all:
                            self.refuse(f"touches {place}: an answer reads no solution and leaves the course's files "
                                        "alone")
        elif event in STARTS_A_PROGRAM:
            if not self.by_the_library():
                self.refuse("starts another program; an answer has no need to")
        elif event in SENDS_A_SIGNAL:
            if args[0] != getpid() and not self.by_the_library():
                self.refuse("sends a signal to another process; an answer has no need to")
        elif event in LOOKS_AT_ALL_OBJECTS:
            if not self.by_the_library():
                self.refuse(f"calls {event}; an answer has no need to")
        elif event in MAKES_CODE and isinstance(args[1], (str, bytes)) and text(args[1]).startswith(self.trusted):
            if not str.startswith(_getframe(1).f_code.co_filename, "<frozen importlib") and not self.by_the_library():
                self.refuse(f"makes code that says it is of {text(args[1])}")

    def by_the_library(self):
        frame = _getframe(2)
        while frame.f_back is not None and str.startswith(frame.f_code.co_filename, "<frozen"):
            frame = frame.f_back
        return str.startswith(frame.f_code.co_filename, self.trusted)

    def refuse(self, sentence):
        """Leave the note, and end: an exception could be caught, and its frames lead here."""
        try:
            write(self.note, (sentence + "\n").encode("utf-8", "surrogateescape"))
        finally:
            _exit(1)
