"""Starts the processes of a check and brings back what they wrote, or what went wrong, in the learner's words.

The child's files are data of an unknown author: nothing in them is run or unpickled, and no verdict is read from them.
"""

import dis
import importlib.util
import inspect
import json
import os
import re
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from minitorch_dist.launch_env import patience
from minitorch_dist.testing import ranks as launcher

from .check import Outputs
from .child import FILE_BYTES, Unknown, load, save
from .course import ROOT
from .fence import forbidden

CHILD = Path(__file__).with_name("child.py")
PYTHON_FLAGS = ("-I", "-u", "-B", "-X", "utf8", "-X", "faulthandler")     # -I ignores PYTHON… in the environment
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
               "TRITON_INTERPRET": "1"}      # Triton asks when it is imported: kernels run in its interpreter, in NumPy
STARTING_SECONDS = 15      # that a launch may take beyond its limit
STILL_SECONDS = 1.5        # if all ranks have waited in one call for so long, they wait for each other
MOVING_SECONDS = 0.3       # ranks of which one has begun a call within so long before the limit are slow, not stuck
MOST_BYTES = 1 << 28       # of the outputs of one process
MOST_SOURCE = 1 << 18      # bytes of an answer's file
PRINTED_LINES = 12
LAUNCHER_LINES = 8         # the last ones, of a launcher that starts nobody
LONGEST_LINE = 200         # characters of a quoted line


@dataclass
class Failure:
    """Why there are no outputs to judge.

    kind     "not begun", "syntax", "not installed", "no ranks", "forbidden", "error", "deadlock", "slow" or "no answer"
    message  one sentence
    details  further lines
    case     number of the case in which it happened, from 0; None: outside of all, or nobody knows
    """

    kind: str
    message: str
    details: list = field(default_factory=list)
    case: int | None = None


@dataclass
class Launched:
    """What came of a launch: outputs[case][rank], or a Failure; and what the answer printed, by rank."""

    outputs: list | None
    failure: Failure | None
    printed: list
    seconds: float


def read_source(path):
    """(text, code, None) of an answer's file, or ("", None, Failure) if it is no Python."""
    try:
        size = os.path.getsize(path)
        if size > MOST_SOURCE:
            return "", None, Failure("syntax", f"{Path(path).name} has {size:,} bytes: an answer has at most "
                                               f"{MOST_SOURCE:,}")
        text = Path(path).read_text(encoding="utf-8-sig")      # some editors begin a file with a byte order mark
        return text, compile(text, str(path), "exec", dont_inherit=True), None
    except SyntaxError as error:
        line = (error.text or "").rstrip()[:LONGEST_LINE]
        pointer = " " * min(max((error.offset or 1) - 1, 0), len(line)) + "^"
        place = f"line {error.lineno} of " * bool(error.lineno)      # none of a file with null bytes
        return "", None, Failure("syntax", f"{place}{Path(path).name} is not Python: {error.msg}",
                                 [f"    {line}", f"    {pointer}"] if line else [])
    except ValueError as error:
        return "", None, Failure("syntax", f"{Path(path).name} is not text in UTF-8: {error}")
    except (RecursionError, MemoryError):
        return "", None, Failure("syntax", f"{Path(path).name} is nested too deeply for Python")
    except OSError as error:
        return "", None, Failure("no answer", f"{Path(path).name} can't be read: {error.strerror}")


def forbidden_import(exercise, code):
    """A Failure if the code imports what the exercise forbids, at the line where it does."""
    for line, names in sorted(imports(code)):
        for name in names:
            if forbidden(name, exercise.allow, exercise.forbid):
                return Failure("forbidden", f"your line {line} imports {name}: this exercise is to be written "
                                            "without it")
    return None


def imports(code):
    """Yield (line, [module, module.name, …]) of each import, relative ones excepted, in a code object and those in it.

    Not by `ast`: in Python 3.11 its trees are made with a counter that all threads share, and checks run in threads
    (https://github.com/python/cpython/issues/106905).
    """
    found = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    for level, names, step in zip(found, found[1:], found[2:], strict=False):
        if step.opname == "IMPORT_NAME" and not level.argval:
            yield step.positions.lineno, [step.argval, *(f"{step.argval}.{name}" for name in names.argval or ())]
    for inner in code.co_consts:
        if inspect.iscode(inner):
            yield from imports(inner)


def missing_package(exercise):
    """A Failure if a package that the exercise allows, and so needs, isn't there."""
    for name in exercise.allow:
        package = name.partition(".")[0]
        if importlib.util.find_spec(package) is None:
            return Failure("not installed", f"this exercise needs {package}, which isn't installed: pip install "
                                            f"{package}. The chapter's README says where there is one")
    return None


def launch(exercise, path, cases, n, uses=None, closed=(), drive=None, limit=None, memory=None, start=launcher.launch):
    """Run the answer in the file `path` on n ranks, with cases[case][rank] as inputs; a Launched.

    uses    {id: (path, object)} of earlier answers
    closed  folders that the answer may not touch
    drive   the chapter's drive.py, if it has one
    start   who starts the processes: ranks.launch, or starting.Starters' launch
    """
    text, code, failure = read_source(path)
    failure = failure or missing_package(exercise) or forbidden_import(exercise, code)
    if failure:
        return Launched(None, failure, [], 0.0)
    box = Path(tempfile.mkdtemp(prefix="check-")).resolve()
    try:
        job = _prepare(box, exercise, path, cases, n, uses or {}, closed, drive, limit, memory)
        run = start([*PYTHON_FLAGS, CHILD, box], n, job["limit"] + STARTING_SECONDS * patience(), cwd=box / "cwd",
                    inherit=False, still=STILL_SECONDS * patience(), env=ENVIRONMENT | {"HOME": str(box / "cwd")})
        printed = [out.splitlines()[-PRINTED_LINES:] for out in run.stdout]
        failure = _failure(box, exercise, run, n, exercise.limit if limit is None else limit, text)
        outputs = None
        if failure is None:
            outputs, failure = _read_outputs(box, len(cases), n)
        elif failure.kind in ("error", "deadlock", "slow"):
            failure.case = _case(box, n, len(cases))
        return Launched(outputs, failure, printed, run.seconds)
    finally:
        shutil.rmtree(box, ignore_errors=True)


# ---------------------------------------------------------------- before

def _prepare(box, exercise, path, cases, n, uses, closed, drive, limit, memory):
    (box / "cwd").mkdir()

    def copied(source, folder):
        (box / "answers" / folder).mkdir(parents=True)
        return str(shutil.copyfile(source, box / "answers" / folder / Path(source).name))
    # `answers/` holds the learner's file under its own name, so that lines can be told from the frame's.
    job = {"answer": copied(path, "answer"), "object": exercise.object, "kind": exercise.kind,
           "allow": exercise.allow, "forbid": exercise.forbid, "ops": exercise.ops,
           "uses": {id: (copied(source, id), name) for id, (source, name) in uses.items()},
           "drive": str(drive) if drive and Path(drive).is_file() else None,
           "closed": [str(folder) for folder in closed], "checkout": str(ROOT),
           "limit": (exercise.limit if limit is None else limit) * patience(),
           "memory": exercise.memory if memory is None or not exercise.memory else memory}
    try:
        (box / "job.json").write_text(json.dumps(job))
        for rank in range(n):
            save(box / f"in-{rank}.values", [case[rank] for case in cases])
    except OSError as error:
        error.filename = error.filename or str(box)     # of a full disk writing says nothing of the file
        raise
    return job


# ---------------------------------------------------------------- after

def _failure(box, exercise, run, n, limit, text):
    """What went wrong, or None if every rank has left outputs."""
    if not run.started:
        return _no_ranks(run, n)
    notes = [_text(box / f"forbidden-{rank}").splitlines() for rank in range(n)]
    for line in (line for lines in notes for line in lines):
        return Failure("forbidden", f"your answer {line}")
    errors = {rank: _error(box / f"error-{rank}.json") for rank in range(n)}
    errors = {rank: error for rank, error in errors.items() if error}
    if errors:
        return _raised(exercise, errors, n, text)
    finished = [(box / f"out-{rank}.values").is_file() for rank in range(n)]
    if all(finished) and not run.timed_out:
        return None
    stacks = [run.stack[rank] or _text(box / f"late-{rank}") for rank in range(n)]
    waiting = [bool(state and state["waiting"]) for state in run.state]
    late = run.timed_out or any(_text(box / f"late-{rank}") for rank in range(n))
    moving = n > 1 and late and run.quiet < MOVING_SECONDS * patience()
    if any(waiting) and (late or all(waiting)) and not moving:
        return _deadlock(box, run, stacks, finished, n, text)
    if late:
        lines = [_learner_line(box, stack, text) for stack in stacks]
        where = [line for line in lines if line]
        calls = max(state["calls"] if state else 0 for state in run.state)
        going = f". No deadlock: the ranks still went from one call to the next, with {calls:,} begun" if moving else ""
        return Failure("slow", f"no answer within {limit:g} s{going}" + (f": it was at {where[0]}" if where else ""))
    missing = [rank for rank in range(n) if not finished[rank]]
    who = "your program" if n == 1 else f"rank {missing[0]} of {n}"
    said = [line for rank in missing for line in _not_ours(run.stderr[rank])[-4:]]
    return Failure("no answer", f"{who} ended before it gave an answer (status {run.returncode}): does it call exit, "
                                "os._exit or kill?", [f"    {line}" for line in said])


def _no_ranks(run, n):
    how = f"in {run.seconds:.0f} s" if run.timed_out else f"and ended with status {run.returncode}"
    said = [line for line in run.launcher_stderr.splitlines() if line.strip("= ")][-LAUNCHER_LINES:]
    return Failure("no ranks", f"mpirun started none of {n} ranks {how}: your answer was never run, and MPI itself is "
                               "what doesn't work here (python -m minitorch_dist doctor looks at it). "
                               + (f"{run.command[0]} says:" if said else f"{run.command[0]} says nothing"),
                   [f"    {line}" for line in said])


def _not_ours(stderr):
    """The lines of it, but for those of a stack that are of this folder's files, and for the C stack of a crash, which
    Python prints since 3.14."""
    stderr = re.sub(r"Current thread's C stack trace.*\n(  .*\n)*", "", stderr)
    return [line for line in stderr.strip().splitlines() if os.path.dirname(CHILD) + os.sep not in line]


def _text(path):
    if not path.is_file():      # a pipe that the answer has put there would never end
        return ""
    try:
        with open(path, errors="replace") as file:
            return file.read(1 << 20)
    except OSError:
        return ""


def _case(box, n, count):
    """The case that the ranks have got to; none goes on to the next before all are through with one."""
    notes = [_text(box / f"case-{rank}") for rank in range(n)]
    numbers = [int(note) for note in notes if note.isdecimal() and len(note) < 9]
    return max((number for number in numbers if number < count), default=None)


def _error(path):
    try:
        error = json.loads(_text(path) or "null")
        return error and {"type": str(error["type"]), "text": str(error["text"]),
                          "frames": [(str(file), int(line)) for file, line in error["frames"]],
                          "called": [str(line) for line in error["called"]]}
    except (ValueError, TypeError, KeyError):
        return {"type": "Error", "text": "(its report is damaged)", "frames": [], "called": []}


def _quote(number, text):
    lines = text.splitlines()
    line = f": {lines[number - 1].strip()[:LONGEST_LINE]}" if 0 < number <= len(lines) else ""
    return f"your line {number}{line}"


def _raised(exercise, errors, n, text):
    """The sentence for exceptions: the first rank's, and a rank's own rather than the quarrel that followed from it."""
    own = {rank: error for rank, error in errors.items() if error["type"] != "MismatchError"} or errors
    rank, error = min(own.items())
    kind, words = error["type"], error["text"]
    mine = [line for file, line in error["frames"] if file.startswith("answer" + os.sep)]
    earlier = [file for file, _ in error["frames"] if not file.startswith("answer" + os.sep)]
    where = _quote(mine[-1], text) if mine else ""
    if kind == "NotImplementedError" and not earlier:
        return Failure("not begun", f"not begun: {words}", [f"    in line {mine[-1]}"] if mine else [])
    if kind == "MismatchError":
        table = [_shorten(line) for line in words.splitlines()[1:-1]]
        return Failure("error", "the ranks call different collectives; all must call the same, in the same order",
                       ["  " + line for line in table])
    if kind == "Forbidden":
        return Failure("forbidden", words, [f"    {where}"] if where else [])
    if kind == "SystemExit":
        return Failure("no answer", "your program ends itself (SystemExit) before it gives an answer", [f"    {where}"])
    if kind == "LookupError" and not error["frames"]:
        return Failure("error", f"{words}: keep the name {exercise.object!r}")
    lacks = re.match(r"module 'answer' has no attribute '(\w+)'", words)      # one of several, asked for by drive.py
    if lacks and not error["frames"]:
        return Failure("error", f"there is no {lacks[1]} in the file: keep the name {lacks[1]!r}")
    who = f"rank {rank} of {n}: " if n > 1 else ""
    if kind == "Unsaved":
        return Failure("no answer", f"{who}what your answer gave can't be written down (at most "
                                    f"{FILE_BYTES >> 20} MB): {words}")
    details = [f"    at {where}"] if where else []
    if not error["frames"]:
        details += [f"    not in your file, but where the check uses it: {line}" for line in error["called"]]
        if kind == "TypeError" and re.match(r"[\w.]+\(\) (got|missing|takes) .*argument", words):
            details.append("    keep its arguments as the skeleton has them, their names too: it is called with these")
    if earlier:
        details.append(f"    called by or inside {earlier[-1]}")
    return Failure("error", f"{who}{kind}: {words}", details)


def _shorten(line):
    """A row of the mismatch table, with the learner's lines named as such."""
    line = re.sub(r"barrier\(\)\s+\S*child\.py:.*", "has returned already", line)
    return re.sub(r"\S*[/\\]answers[/\\]answer[/\\]\S+?:(\d+) in \S+?(:|$)", r"your line \1\2", line)


def _learner_line(box, stack, text):
    found = re.findall(rf'File "{re.escape(str(box / "answers" / "answer"))}[^"]*", line (\d+)', stack)
    return _quote(int(found[0]), text) if found else None     # faulthandler names the innermost first


def _deadlock(box, run, stacks, finished, n, text):
    lines = []
    for rank in range(n):
        state, where = run.state[rank], _learner_line(box, stacks[rank], text)
        if finished[rank] or state and state["waiting"] and state["op"] == "barrier" and where is None:
            lines.append(f"rank {rank} has returned already")
        elif state and state["waiting"]:
            name = {"recv": "src", "irecv": "src", "broadcast": "src", "scatter": "src"}.get(state["op"], "dst")
            peer = "" if state["peer"] is None else f"{name}={state['peer']}"
            lines.append(f"rank {rank} waits in {state['op']}({peer}) at {where or 'a place outside your file'}")
        else:
            lines.append(f"rank {rank} computes" + (f" at {where}" if where else ""))
    return Failure("deadlock", f"deadlock on {n} ranks: {lines[0]}", ["  " + line for line in lines[1:]])


def _read_outputs(box, cases, n):
    outputs = [[None] * n for _ in range(cases)]
    for rank in range(n):
        try:
            for i, record in enumerate(_read_records(box / f"out-{rank}.values", cases)):
                outputs[i][rank] = record
        except Exception as error:      # whatever a file of an unknown author can bring about
            return None, Failure("no answer", f"the outputs of rank {rank} can't be read: {error}")
    return outputs, None


def _read_records(path, cases):
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise ValueError(f"they have {size:,} bytes")
    records = load(path)
    if len(records) != cases:
        raise ValueError(f"{len(records)} cases instead of {cases}")
    return [_outputs(record) for record in records]


def _outputs(record):
    values = record["outputs"]
    outputs = Outputs(values if isinstance(values, dict) else {"result": Unknown(type(values).__name__)})
    outputs.seconds = float(record["seconds"])
    if "calls" in record:
        outputs.calls = [dict(call) for call in record["calls"]]
        outputs.sent = {str(op): int(n) for op, n in record["sent"].items()}
        outputs.events = [tuple(event) for event in record["events"]]
    return outputs
