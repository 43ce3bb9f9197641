"""What lies on disk: chapters, exercises, and the names by which learners call them."""

import difflib
import functools
import os
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("plain", "ranks")
SLOTS = ("optimizer", "loss", "collective", "gradient_sync", "sampler")
RANKS = (2, 4, 1)     # two first: most mistakes show there, and it is quick


class CourseError(ValueError):
    """Something that the person at the keyboard can mend; the message says what and how."""


@dataclass(frozen=True)
class Exercise:
    """One function or class to be written.

    id      "08.1"
    file    name of the file, the same in exercises/, solutions/ and mine/
    object  the function or class in it that is checked
    kind    "plain" (one process, nothing but NumPy loaded) or "ranks" (the first argument is a Communicator)
    ranks   how many ranks to run it on, one launch each
    allow   modules that an answer may import beyond NumPy and the standard library; of those, `forbid` ones not
    ops     if given, the only methods of the communicator that may be called
    uses    ids of earlier exercises whose answers are passed in, by the name of their object
    slot    the part of the capstone's training run that this answer can take over
    limit   seconds for all cases of one launch
    memory  gigabytes of address space per process; 0: no limit (a GPU's driver maps more than there is)
    """

    id: str
    folder: str
    file: str
    object: str
    title: str
    kind: str = "plain"
    ranks: tuple = (1,)
    allow: tuple = ()
    forbid: tuple = ()
    ops: tuple = ()
    uses: tuple = ()
    slot: str | None = None
    limit: float = 3.0
    memory: float = 4.0


@dataclass(frozen=True)
class Chapter:
    """One folder. needs: numbers of the chapters that come before it."""

    number: int
    folder: str
    title: str
    needs: tuple
    minutes: int
    exercises: list = field(default_factory=list)

    @property
    def label(self):
        return f"{self.number:02d}"


@dataclass(frozen=True)
class Course:
    """Where everything lies, and what there is. `mine` holds the learner's answers."""

    exercises: Path = ROOT / "exercises"
    solutions: Path = ROOT / "solutions"
    mine: Path = ROOT / "mine"

    @classmethod
    def from_environment(cls):
        """The course, with the learner's answers in the folder that MINITORCH_MINE names, if it names one."""
        mine = os.environ.get("MINITORCH_MINE")
        return cls(mine=Path(mine).resolve()) if mine else cls()

    @functools.cached_property
    def chapters(self):
        """[Chapter], by number."""
        folders = sorted(path for path in self.exercises.glob("[0-9][0-9]_*") if (path / "chapter.toml").is_file())
        return [read_chapter(path) for path in folders]

    @property
    def all_exercises(self):
        return [exercise for chapter in self.chapters for exercise in chapter.exercises]

    def chapter(self, number):
        """The Chapter of that number."""
        return next(chapter for chapter in self.chapters if chapter.number == number)

    def exercise(self, id):
        """The Exercise of that id."""
        return next(exercise for exercise in self.all_exercises if exercise.id == id)

    def find(self, name):
        """The exercises that a learner means by "8", "08", "08.1", "8.1", "08_data_parallel", "shard" or the path of
        an answer, as shells complete it.

        CourseError with the nearest names if there are none.
        """
        text = name.strip().rstrip("/").lower()
        folder, _, file = text.rpartition("/")
        found = [e for e in self.all_exercises
                 if text in (e.id, e.id.removeprefix("0"), e.folder, e.object.lower(), e.file.lower())
                 or file == e.folder or file == e.file.lower() and os.path.basename(folder) == e.folder
                 or re.fullmatch(r"\d{1,2}", text) and int(text) == int(e.id[:2])]
        if found:
            return found
        if re.fullmatch(r"\d{1,2}", text) and any(int(text) == chapter.number for chapter in self.chapters):
            raise CourseError(f"chapter {text} has no exercise to check: open its README.md")
        names = [n for e in self.all_exercises for n in (e.id, e.id.removeprefix("0"), e.object)]
        near = list(dict.fromkeys(difflib.get_close_matches(text, names, n=4, cutoff=0.4))) * (not text.isdigit())
        known = ", ".join(chapter.label for chapter in self.chapters)
        raise CourseError(f"there is no exercise {name!r}" + (f"; did you mean {' or '.join(near)}?" if near else ".")
                          + f" The chapters are {known}")


def read_chapter(folder):
    """The Chapter of a folder's chapter.toml. CourseError for a key that doesn't belong."""
    data = tomllib.loads((folder / "chapter.toml").read_text(encoding="utf-8"))
    entries = data.pop("exercise", [])
    number = int(folder.name[:2])
    unknown = set(data) - {"title", "needs", "minutes"}
    if unknown:
        raise CourseError(f"{folder.name}/chapter.toml: unknown keys {sorted(unknown)}")
    exercises = [_exercise(folder.name, f"{number:02d}.{i}", entry) for i, entry in enumerate(entries, 1)]
    return Chapter(number, folder.name, data["title"], tuple(data["needs"]), data["minutes"], exercises)


def _exercise(folder, id, entry):
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}
    if fields.get("kind") == "ranks":
        fields.setdefault("ranks", RANKS)
    try:
        exercise = Exercise(id=id, folder=folder, **fields)
    except TypeError as error:
        raise CourseError(f"{folder}/chapter.toml, exercise {id}: {error}") from None
    for name, value, known in (("kind", exercise.kind, KINDS), ("slot", exercise.slot, (None, *SLOTS))):
        if value not in known:
            raise CourseError(f"{folder}/chapter.toml, exercise {id}: {name} = {value!r} is none of {known}")
    return exercise
