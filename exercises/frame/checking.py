"""One answer in, one Verdict out."""

import functools
import importlib.util
import inspect
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from minitorch_dist.testing import ranks

from . import comparing, judge, launch, wording
from .check import Check
from .course import ROOT, CourseError

CLOSED = tuple(ROOT / folder for folder in ("exercises", "solutions", "mine", "tests"))
LOADING = threading.Lock()


@dataclass
class Verdict:
    """What became of an answer.

    passed   bool
    kind     "passed", "wrong", or the kind of a launch.Failure
    message  one sentence, for the learner
    details  lines under it
    printed  what the answer itself printed, a list of lines per rank
    seed     with which the same inputs are drawn again
    seconds  all launches together
    runs     {number of ranks: [(case, got)]} of the launches whose outputs were right
    """

    passed: bool
    kind: str
    message: str
    details: list = field(default_factory=list)
    printed: list = field(default_factory=list)
    seed: int = 0
    seconds: float = 0.0
    runs: dict = field(default_factory=dict)

    def text(self):
        """Sentence and lines."""
        return "\n".join([self.message, *self.details])


@functools.lru_cache(maxsize=64)
def _checks(path, mtime):
    """check.py as a package of the chapter's folder, so that it can say `from .tape import Node`."""
    package, folder = f"check_{Path(path).parent.name}", str(Path(path).parent)
    for name in [name for name in list(sys.modules) if name.startswith(package + ".")]:      # other threads import, too
        del sys.modules[name]       # they may have changed as well
    spec = importlib.util.spec_from_file_location(package, path, submodule_search_locations=[folder])
    module = importlib.util.module_from_spec(spec)
    sys.modules[package] = module
    spec.loader.exec_module(module)
    classes = [value for value in vars(module).values() if inspect.isclass(value) and issubclass(value, Check)]
    return {value.exercise: value() for value in classes if value.exercise is not None}


def checks_of(folder):
    """{exercise id: Check} of a chapter's folder."""
    path = folder / "check.py"
    with LOADING:
        return _checks(str(path), path.stat().st_mtime_ns)


def check_answer(course, exercise, path, uses=None, seed=None, limit=None, memory=None, start=ranks.launch):
    """Check the answer in the file `path`; a Verdict. It stops at the first number of ranks that rejects.

    uses          {id: (path, object)} of the earlier answers that the exercise uses
    seed          of the inputs; None: a new one. Every number of ranks draws from the same stream
    limit, memory instead of the exercise's own
    start         who starts the processes (launch.launch)
    """
    folder = course.exercises / exercise.folder
    check = checks_of(folder).get(exercise.id)
    if check is None:
        raise CourseError(f"{folder / 'check.py'} has no Check for exercise {exercise.id}")
    if not Path(path).is_file():
        return Verdict(False, "no answer", f"there is no file {path}")
    seed = int.from_bytes(os.urandom(4), "little") if seed is None else seed
    verdict = Verdict(True, "passed", "passed", seed=seed)
    begin = time.monotonic()
    for n in exercise.ranks:
        cases = check.cases(np.random.default_rng(seed), n)
        launched = launch.launch(exercise, path, [comparing.per_rank(case) for case in cases], n, uses, CLOSED,
                                 folder / "drive.py", limit, memory, start)
        verdict.printed = launched.printed
        failure = launched.failure
        if failure is not None and failure.case is not None:
            failure.details += wording.place(cases, failure.case, n)
        if failure is None:
            finding = judge.judge(check, cases, launched.outputs, n)
            failure = finding and launch.Failure("wrong", finding.sentence, finding.details)
        if failure is not None:
            verdict.passed, verdict.kind = False, failure.kind
            verdict.message, verdict.details = failure.message, failure.details
            break
        verdict.runs[n] = [(case, judge.as_given(case, got)) for case, got in
                           zip(cases, launched.outputs, strict=True)]
    verdict.seconds = time.monotonic() - begin
    return verdict


def draw(course, exercise, verdict, path):
    """The picture of a run that has passed, into the file `path`; (path, sentence), or None if there is none."""
    check = checks_of(course.exercises / exercise.folder)[exercise.id]
    if type(check).picture is Check.picture:
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    return path, check.picture(verdict.runs, path)
