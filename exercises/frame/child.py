"""What runs in each process of a check: `python -I child.py BOX`.

Loads the learner's file by its path, calls it with this rank's inputs, and writes down what came out. It judges
nothing and knows no truth: that is the parent's, which trusts nothing of what is written here (launch.py).
"""

import builtins
import faulthandler
import functools
import importlib
import importlib.util
import json
import linecache
import math
import os
import resource
import signal
import sys
import time
import traceback
import types
from pathlib import Path

import numpy as np

FENCE = Path(__file__).with_name("fence.py")
FILE_BYTES = 1 << 26     # the largest file that a process may write
CPU_SECONDS = 20         # beyond the limit, for starting up
AFTER_THE_LIMIT = 0.4    # seconds for the other ranks to write their stacks too
DEEPEST = 20
MOST_BITS = 64           # of an int: NumPy computes with no longer ones


class Forbidden(PermissionError):
    """The answer did what this exercise doesn't allow."""


class Unsaved(ValueError):
    """What the answer gave can't be written into a file."""


# ---------------------------------------------------------------- values in files

class Unknown:
    """An output that is no array, number, string, list or dict."""

    def __init__(self, kind):
        self.kind = kind

    def __repr__(self):
        return f"an object of type {self.kind}"


def save(path, value):
    """Write lists and dicts of arrays, numbers and strings into a file, in one move.

    The file: the length of a tree in JSON (8 bytes), the tree, and behind it the arrays' bytes, one after the other.
    NumPy's own format has headers in Python, which must be parsed: not in threads (launch.imports).
    """
    arrays = []
    tree = json.dumps(_pack(value, arrays, 0)).encode()
    part = path.with_suffix(".part")
    with open(part, "wb") as file:
        file.write(len(tree).to_bytes(8, "little") + tree)
        file.writelines(array.tobytes() for array in arrays)
    os.replace(part, path)


def load(path):
    """What `save` has written. Nothing in it is run, and no byte is taken twice."""
    with open(path, "rb") as file:
        tree = file.read(int.from_bytes(file.read(8), "little"))
        return _unpack(json.loads(tree), file)


def _pack(value, arrays, depth):
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject and depth < DEEPEST:
        arrays.append(np.asarray(value))
        return {"array": [arrays[-1].dtype.str, arrays[-1].shape]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"unknown": "long int"} if _too_long(value) else value
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, (list, tuple)) and depth < DEEPEST:
        return [_pack(item, arrays, depth + 1) for item in value]
    if isinstance(value, dict) and depth < DEEPEST:
        return {"dict": [[str(key), _pack(item, arrays, depth + 1)] for key, item in value.items()]}
    return {"unknown": type(value).__name__ + (" of dtype object" if isinstance(value, np.ndarray) else "")}


def _too_long(value):
    return isinstance(value, int) and value.bit_length() > MOST_BITS


def _unpack(tree, file):
    if isinstance(tree, list):
        return [_unpack(item, file) for item in tree]
    if not isinstance(tree, dict):
        return Unknown("long int") if _too_long(tree) else tree
    [(kind, value)] = tree.items()
    if kind == "array":
        return _array(*value, file)
    if kind == "complex":
        return complex(*value)
    if kind == "unknown":
        return Unknown(value)
    return {key: _unpack(item, file) for key, item in value}


def _array(dtype, shape, file):
    dtype = np.dtype(str(dtype))
    if dtype.hasobject or min(shape, default=0) < 0:       # an object's bytes would be its address
        raise ValueError(f"no array of {dtype} and shape {shape}")
    return np.ndarray(shape, dtype, file.read(dtype.itemsize * math.prod(shape))).copy()


# ---------------------------------------------------------------- what an answer may not do

def own_module(path):
    """A module from a file, for one caller alone: under no name, with builtins of its own."""
    spec = importlib.util.spec_from_file_location("own", path)
    module = importlib.util.module_from_spec(spec)
    module.__builtins__ = dict(vars(builtins))
    spec.loader.exec_module(module)
    return module


def close_fence(job, note):
    """From now on what is none of an answer's business ends the process (fence.py). There is no way back."""
    fence = own_module(FENCE)
    allow, forbid = tuple(job["allow"]), tuple(job["forbid"])
    library = sys.modules.get("minitorch_dist")
    trusted = ("<frozen importlib", *([os.path.dirname(library.__file__) + os.sep] if library else []),
               *([job["drive"]] if job["drive"] else []))
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ("minitorch_dist", "mpi4py") and fence.forbidden(name, allow, forbid):
            sys.modules[name] = behind(name, module, trusted)
            parent, _, last = name.rpartition(".")
            if parent in sys.modules and not fence.forbidden(parent, allow, forbid):
                setattr(sys.modules[parent], last, sys.modules[name])
    # Who prints a stack reads the lines of these.
    open_to_all = (__file__, str(Path(__file__).with_name("starter.py")), job["drive"])
    sys.addaudithook(fence.Fence(note, job["closed"], open_to_all, trusted, allow, forbid).watch)


def behind(name, module, trusted):
    """A stand-in for the module, which only the library itself can use."""
    class Behind(types.ModuleType):
        def __getattribute__(self, attribute):
            if not sys._getframe(1).f_code.co_filename.startswith(trusted):
                sys.audit("import", name)       # the fence refuses it
                raise Forbidden(f"imports {name}")
            return getattr(module, attribute)
    return Behind(name)


class Recorder:
    """A communicator's hook: what was called, from which line, from when to when."""

    def __init__(self, allowed, answer):
        self.allowed, self.answer, self.calls, self.open = allowed, answer, [], {}

    def before(self, op, x, peer):
        if self.allowed and op not in self.allowed:
            raise Forbidden(f"comm.{op} is not for this exercise: build it from {' and '.join(self.allowed)}")
        self.open[op, id(x), peer] = len(self.calls)
        self.calls.append({"op": op, "peer": peer, "bytes": 0 if x is None else int(x.nbytes), "line": self.line(),
                           "begin": time.perf_counter(), "end": None})

    def after(self, op, x, peer):
        at = self.open.pop((op, id(x), peer), None)
        if at is not None:
            self.calls[at]["end"] = time.perf_counter()

    def line(self):
        frame = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename != self.answer:
            frame = frame.f_back
        return None if frame is None else frame.f_lineno


# ---------------------------------------------------------------- memory that nobody has written

def visibly_unwritten(make):
    """np.empty and its like, whose elements are nan (of integers the largest there is) until somebody writes them.

    Fresh memory often holds zeros, and then what was never written is right by chance.
    """
    @functools.wraps(make)
    def made(*args, **kwargs):
        array = make(*args, **kwargs)
        if array.dtype.kind in "fc":
            array.fill(np.nan)
        elif array.dtype.kind in "iu":
            array.fill(np.iinfo(array.dtype).max)
        return array
    return made


# ---------------------------------------------------------------- the run

def load_module(path, name):
    """A module from a file."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def plain_drive(learner, inputs, run):
    """How an answer is called unless the chapter's drive.py has a function of its name."""
    inputs = inputs | run.earlier
    result = learner(**inputs) if run.comm is None else learner(run.comm, **inputs)
    return {"result": result, **{name: value for name, value in inputs.items() if name not in run.earlier}}


def run_case(drive, learner, inputs, run, job):
    """One case: what `drive` gives, and what happened meanwhile."""
    begin = time.perf_counter()
    if run.comm is None:
        return {"outputs": drive(learner, inputs, run), "seconds": time.perf_counter() - begin}
    recorder = Recorder(job["ops"], job["answer"])
    run.comm.hooks[:] = [recorder]
    with run.ledger.record() as book:
        outputs = drive(learner, inputs, run)
    seconds = time.perf_counter() - begin
    run.comm.hooks.clear()
    run.comm.barrier()       # no rank begins the next case while another is still in this one
    return {"outputs": outputs, "seconds": seconds, "calls": recorder.calls, "events": book.events,
            "sent": {op: n for (_, op), n in book.bytes_sent.items()}}


def set_limits(job, late):
    """Of time, memory and files, or the account's own where those are lower. At the time limit every rank writes its
    stack, then ends."""
    for kind, limit in ((resource.RLIMIT_CPU, int(job["limit"] + CPU_SECONDS)), (resource.RLIMIT_FSIZE, FILE_BYTES),
                        (resource.RLIMIT_AS, int(job["memory"] * 2**30)), (resource.RLIMIT_CORE, 0)):
        if limit or kind == resource.RLIMIT_CORE:
            highest = resource.getrlimit(kind)[1]
            limit = limit if highest == resource.RLIM_INFINITY else min(limit, highest)
            resource.setrlimit(kind, (limit, limit))
    faulthandler.dump_traceback_later(job["limit"], file=late)
    signal.setitimer(signal.ITIMER_REAL, job["limit"] + AFTER_THE_LIMIT)


def describe(error, answers, drive):
    """An exception as data: its kind and words, where in the learner's files, and the line of drive.py that called."""
    steps = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    frames = [[os.path.relpath(file, answers), line] for file, line in steps if file.startswith(answers)]
    called = [linecache.getline(file, line).strip() for file, line in steps if file == drive]
    return {"type": type(error).__name__, "text": str(error)[:4000], "frames": frames, "called": called[-1:]}


def save_records(path, records):
    """Write down what came out, or say why that can't be done: it may be anything, of any size."""
    try:
        save(path, records)
    except Exception as error:
        raise Unsaved(f"{type(error).__name__}: {error}".strip(": ")) from None


def main(box):
    job = json.loads((box / "job.json").read_text())
    comm, ledger, rank = None, None, 0
    sys.path.insert(0, job["checkout"])       # the library beside the course, whichever is installed, if any
    for name in job["allow"]:
        importlib.import_module(name)
    if job["kind"] == "ranks":
        from minitorch_dist import comm as library
        from minitorch_dist import ledger
        from minitorch_dist.comm import where
        where.users = job["answer"]       # of a call that drive.py passes on the answer's line is told
        comm = library.world()
        rank = comm.rank
    sys.path.remove(job["checkout"])
    cases = load(box / f"in-{rank}.values")
    (box / f"in-{rank}.values").unlink()
    drives = load_module(job["drive"], "drive") if job["drive"] else None
    drive = getattr(drives, job["object"], plain_drive)
    if comm is not None:
        comm.barrier()       # nobody's inputs lie about any more
    error_file = os.open(box / f"error-{rank}.json", os.O_WRONLY | os.O_CREAT)
    case_file = os.open(box / f"case-{rank}", os.O_WRONLY | os.O_CREAT)
    set_limits(job, open(box / f"late-{rank}", "w"))
    np.empty, np.empty_like = visibly_unwritten(np.empty), visibly_unwritten(np.empty_like)
    close_fence(job, box / f"forbidden-{rank}")
    try:
        objects = {id: getattr(load_module(path, f"earlier_{id.replace('.', '_')}"), name)
                   for id, (path, name) in job["uses"].items()}
        earlier = {job["uses"][id][1]: value for id, value in objects.items()}
        module = load_module(job["answer"], "answer")
        if not hasattr(module, job["object"]):
            raise LookupError(f"there is no {job['object']} in the file")
        run = types.SimpleNamespace(comm=comm, ledger=ledger, module=module, earlier=earlier)
        records = []
        for number, inputs in enumerate(cases):
            os.pwrite(case_file, str(number).encode(), 0)
            records.append(run_case(drive, getattr(module, job["object"]), inputs, run, job))
        save_records(box / f"out-{rank}.values", records)
    except BaseException as error:
        os.write(error_file, json.dumps(describe(error, str(box / "answers") + os.sep, job["drive"])).encode())
        os._exit(1)          # under the guard (comm/guard.py): the other ranks end too
    faulthandler.cancel_dump_traceback_later()
    signal.setitimer(signal.ITIMER_REAL, 0)
    if comm is None:
        os._exit(0)          # nobody waits for the answer's threads, which may never end


if __name__ == "__main__":
    main(Path(sys.argv[1]))
