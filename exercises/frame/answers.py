"""The learner's side: the files in mine/, what has been passed, whose earlier answers are used, and slots."""

import datetime
import fcntl
import hashlib
import itertools
import json
import os
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from .child import load_module
from .course import CourseError

PROGRESS = "progress.json"


@dataclass(frozen=True)
class Slot:
    """Whose piece takes over a part of the training run.

    piece    the function or class
    whose    "mine" or "ours"
    id       of the exercise
    path     of the file that it is from
    """

    piece: object
    whose: str
    id: str
    path: Path


def digest(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


class Answers:
    """The answers in course.mine and their progress. Progress is {id: {"passed", "sha256", "hints", …}}."""

    def __init__(self, course):
        self.course = course

    # ------------------------------------------------------------ files

    def path(self, exercise):
        """Where the learner's file is."""
        return self.course.mine / exercise.folder / exercise.file

    def skeleton(self, exercise):
        return self.course.exercises / exercise.folder / exercise.file

    def solution(self, exercise):
        return self.course.solutions / exercise.folder / exercise.file

    def begin(self, exercise):
        """Make the learner's file from the skeleton, unless it is there. True if it was made."""
        path = self.path(exercise)
        if path.is_file():
            return False
        if os.path.lexists(path):
            raise CourseError(f"{path} is a folder or a broken link, and your file belongs there: move it away")
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "xb") as file:      # never over one that an editor has just saved
            file.write(self.skeleton(exercise).read_bytes())
        return True

    def reset(self, exercise):
        """Put the skeleton back; the path of the copy of what was there."""
        path = self.path(exercise)
        if not path.is_file():
            raise CourseError(f"there is no {path}: nothing to reset")
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        folder = path.parent / "backup"
        folder.mkdir(exist_ok=True)
        with self.alone():
            names = (f"{path.stem}-{stamp}{more}.py" for more in itertools.chain([""], map("-{}".format, range(2, 99))))
            backup = next(folder / name for name in names if not os.path.lexists(folder / name))
            os.replace(path, backup)
        self.begin(exercise)
        self.note(exercise, passed=None, sha256=None)
        return backup

    @contextmanager
    def alone(self):
        """While no other command of the course changes what is in mine/, as `hint` beside `watch` does. (A file system
        without such locks, as some over networks, lets everybody pass.)"""
        self.course.mine.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.course.mine, os.O_RDONLY)
        try:
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    # ------------------------------------------------------------ progress

    def progress(self):
        """What is known of every exercise."""
        path = self.course.mine / PROGRESS
        try:
            found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
            found = {id: dict(entry) for id, entry in found.items()}
            for id, entry in found.items():
                hints = entry.get("hints", 0)
                if not isinstance(hints, int) or hints < 0:
                    raise ValueError(f"hints of {id}: {hints!r}")
            return found
        except (ValueError, TypeError, AttributeError) as error:
            raise CourseError(f"{path} is damaged ({error}): mend it, or remove it and check your answers again"
                              ) from None

    def note(self, exercise, **facts):
        """Keep facts of an exercise."""
        path = self.course.mine / PROGRESS
        with self.alone():
            everything = self.progress()
            everything[exercise.id] = everything.get(exercise.id, {}) | facts
            part = path.with_suffix(".part")
            part.write_text(json.dumps(everything, indent=1, sort_keys=True) + "\n", encoding="utf-8")
            os.replace(part, path)

    def known(self, exercise):
        return self.progress().get(exercise.id, {})

    def note_passed(self, exercise, seconds, sha256=None):
        """sha256: of the file when its check began; None: as it is now."""
        self.note(exercise, passed=datetime.date.today().isoformat(), seconds=round(seconds, 2),
                  sha256=sha256 or digest(self.path(exercise)))

    def passed(self, exercise):
        return bool(self.known(exercise).get("passed"))

    def next(self):
        """(the exercise that is meant where none is named, why): the one whose file was changed last, unless it has
        passed as it stands; then the first open one after it, or else of all. (None, "") where all have passed."""
        exercises = self.course.all_exercises
        last = max((e for e in exercises if self.path(e).is_file()), default=None,
                   key=lambda e: self.path(e).stat().st_mtime_ns)
        if last is not None and not self.usable(last):
            return last, "the one whose file you changed last"
        left = [e for e in exercises if not self.passed(e)]
        after = [e for e in left if last is not None and exercises.index(e) > exercises.index(last)]
        if after:
            return after[0], f"the next after {last.id}, whose file you changed last"
        return (left[0], "the first that is open") if left else (None, "")

    # ------------------------------------------------------------ earlier answers

    def usable(self, exercise):
        """Whether the learner's file is the one that has passed."""
        path = self.path(exercise)
        return self.passed(exercise) and path.is_file() and digest(path) == self.known(exercise).get("sha256")

    def choose(self, exercise, which="mine"):
        """(path, "mine" or "ours") of an answer to build upon. which: "mine" where it has passed, or "ours"."""
        if which == "mine" and self.usable(exercise):
            return self.path(exercise), "mine"
        path = self.solution(exercise)
        if not path.is_file():
            raise CourseError(f"{exercise.id} hasn't passed, and there is no {path} to take instead")
        return path, "ours"

    def uses(self, exercise, which="mine"):
        """({id: (path, object)}, {id: whose}) of the earlier answers that an exercise uses."""
        earlier = [self.course.exercise(id) for id in exercise.uses]
        chosen = {e.id: self.choose(e, which) for e in earlier}
        return ({e.id: (chosen[e.id][0], e.object) for e in earlier}, {id: whose for id, (_, whose) in chosen.items()})

    def slots(self, which="mine"):
        """{slot: Slot} of all exercises that name one; of two with the same slot the later. Runs the answers' files."""
        found = {}
        for exercise in self.course.all_exercises:
            if exercise.slot:
                path, whose = self.choose(exercise, which)
                module = load_module(path, f"slot_{exercise.slot}_{whose}")
                found[exercise.slot] = Slot(getattr(module, exercise.object), whose, exercise.id, path)
        return found


def ours(course, exercise):
    """{id: (path, object)}: our answers to what an exercise uses."""
    return Answers(course).uses(exercise, "ours")[0]
