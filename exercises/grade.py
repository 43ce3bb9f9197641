"""For teachers: `python -m exercises grade DIR [--json]` checks what students have handed in.

DIR holds one student's answers, as they lie in mine/ (08_data_parallel/shard.py …), or a folder per student. Only
those files are taken from it: checks, drives and limits are this copy's. Solutions aren't needed; where an exercise
builds on an earlier one, it is the student's own if that has passed.
"""

import argparse
import json
import os
import time
from pathlib import Path

from .frame.checking import check_answer
from .frame.course import CourseError

MEMORY_GB = 2.0
NO_STUDENT = ".", "__MACOSX", "__pycache__"     # what begins like .git, or like what archives of macOS have besides


def seed(text):
    """A seed from the command line."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value}: must be at least 0")
    return value


def add_command(commands):
    found = commands.add_parser("grade", help="for teachers: check what students have handed in", description=__doc__)
    found.add_argument("dir", type=Path, help="one student's answers, or a folder per student")
    found.add_argument("--json", action="store_true", help="a JSON object per line: student, exercise, passed, kind, "
                                                           "message, seconds")
    found.add_argument("--only", metavar="EXERCISE", help="a chapter or an exercise")
    found.add_argument("--seed", type=seed, help="of the inputs: the same for all students")
    found.set_defaults(run=run)


def students(folder, course):
    """{name: folder of answers}: of the folder itself, or of those in it (or in their mine/)."""
    chapters = {chapter.folder for chapter in course.chapters}

    def answers_in(path):
        return next((p for p in (path, path / "mine") if p.is_dir() and any((p / c).is_dir() for c in chapters)), None)
    if not folder.is_dir():
        raise CourseError(f"there is no folder {folder}")
    own = answers_in(folder)
    if own:
        return {named(folder.resolve()): own}
    found = {named(path): answers_in(path) for path in sorted(folder.iterdir())
             if path.is_dir() and not path.name.startswith(NO_STUDENT)}
    if not any(found.values()):
        raise CourseError(f"{folder} holds no answers: expected folders like {min(chapters)}, or a folder per student "
                          "with such folders")
    return found


def named(path):
    """A folder's name, with \\xe4 for what is no text, as archives from elsewhere have it: two names stay two."""
    return os.fsencode(path.name).decode(errors="backslashreplace")


def grade(course, exercises, folder, seed=None):
    """Yield a dict per exercise for one student's folder (None: nothing was handed in)."""
    passed = {}
    for exercise in exercises:
        begin = time.monotonic()
        path = folder and folder / exercise.folder / exercise.file
        result = {"exercise": exercise.id, "passed": False, "kind": "missing", "message": "not handed in"}
        if path and path.is_file() and folder.resolve() not in path.resolve().parents:
            result |= {"kind": "no answer", "message": f"a link to {path.resolve()}, which is not what was handed in"}
        elif path and path.is_file():
            uses = {id: passed.get(id) or our(course, id) for id in exercise.uses}
            missing = [id for id, answer in uses.items() if answer is None]
            if missing:
                result |= {"kind": "needs", "message": f"builds on {', '.join(missing)}, which didn't pass"}
            else:
                result |= graded(course, exercise, path, uses, seed)
                if result["passed"]:
                    passed[exercise.id] = (path, exercise.object)
        yield result | {"seconds": round(time.monotonic() - begin, 2)}


def graded(course, exercise, path, uses, seed):
    """What a check says, as data. One that fails itself is named, and doesn't end the run for all others."""
    try:
        verdict = check_answer(course, exercise, path, uses, seed, memory=MEMORY_GB)
    except CourseError:
        raise
    except Exception as error:
        return {"passed": False, "kind": "check failed",
                "message": f"the check itself failed: {type(error).__name__}: {error}; look at the answer yourself"}
    return {"passed": verdict.passed, "kind": verdict.kind, "message": verdict.message}


def our(course, id):
    """(path, object) of our answer, or None where it can't be read."""
    exercise = course.exercise(id)
    path = course.solutions / exercise.folder / exercise.file
    try:
        path.read_bytes()
    except OSError:
        return None
    return path, exercise.object


def run(args, course, answers, screen):
    """The command. The status is 0 if everything could be graded, whatever came of it."""
    exercises = course.find(args.only) if args.only else course.all_exercises
    for student, folder in students(args.dir, course).items():
        results = []
        for result in grade(course, exercises, folder, args.seed):
            results.append(result)
            if args.json:
                screen.say(json.dumps({"student": student} | result, ensure_ascii=False))
            else:
                state = "passed" if result["passed"] else result["message"]
                screen.say(f"{student}  {result['exercise']}  {state}", "good" if result["passed"] else None)
        if not args.json:
            screen.say(f"{student}: {sum(r['passed'] for r in results)} of {len(results)} passed", "strong")
    return 0
