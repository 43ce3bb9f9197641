"""The learner's command line: `python -m exercises [COMMAND]`."""

import argparse
import difflib
import re
import time

from minitorch_dist import program
from minitorch_dist.testing import ranks as launcher

from . import grade, show
from .frame.answers import Answers, digest
from .frame.checking import check_answer, draw
from .frame.course import Course, CourseError

LOOK_EVERY = 0.3      # seconds between two looks at the file


def main(argv=None, course=None, screen=None):
    """Run one command; the exit status: 0, or 1 where something hasn't passed, or 2 for a wrong call."""
    program.one_process("exercises")
    screen = screen or show.Screen()
    course = course or Course.from_environment()
    args = parser().parse_args(argv)
    try:
        with program.reader_may_leave():
            return args.run(args, course, Answers(course), screen)
    except CourseError as error:
        screen.say(str(error), "bad")
        return 2
    except KeyboardInterrupt:
        screen.say()
        return 130
    except OSError as error:        # mine/ is a file, can't be written, is full
        screen.say(program.in_words(error), "bad")
        return 2


def parser():
    """The commands."""
    top = argparse.ArgumentParser(prog="python -m exercises", description="The course: write the parts yourself. "
                                  "Without a command: the map, and what is next.")
    top.set_defaults(run=run_map)
    commands = top.add_subparsers(metavar="COMMAND")

    def command(name, run, about, which="?"):
        found = commands.add_parser(name, help=about, description=about)
        if which:
            found.add_argument("name", nargs=which, metavar="EXERCISE", help="8, 08, 08.1 or the name of the function")
        found.set_defaults(run=run)
        return found
    command("map", run_map, "the chapters, how far you are, and what is next", which=None)
    for name, run, about in (("check", run_check, "check your answers; without a name the one whose file you changed "
                                                  "last, or the next after it"),
                             ("watch", run_watch, "check whenever you save; goes on to the next when one passes")):
        found = command(name, run, about)
        found.add_argument("--with", dest="which", choices=("mine", "ours"), default="mine",
                           help="whose earlier answers to build upon; mine: yours where they have passed")
        found.add_argument("--seed", type=grade.seed, help="of the inputs, as printed by a check that failed")
    command("hint", run_hint, "one hint more, each time")
    found = command("solution", run_solution, "the difference between your answer and ours, after passing")
    found.add_argument("--give-up", action="store_true", help="show it before you have passed")
    command("reset", run_reset, "begin an exercise anew; what you had is kept in a backup", which=1)
    grade.add_command(commands)
    return top


def chosen(args, course, answers, screen):
    """The exercises meant by the command line; the next one if none is named, and why it is."""
    name = args.name[0] if isinstance(args.name, list) else args.name
    if name is not None:
        return course.find(name)
    coming, why = answers.next()
    if coming is None:
        raise CourseError("all exercises have passed: name one to check it again")
    screen.say(f"{coming.id}: {why}", "quiet")
    return [coming]


def one(args, course, answers, screen):
    """The single exercise that is meant; of a chapter, the first that hasn't passed."""
    found = chosen(args, course, answers, screen)
    return next((exercise for exercise in found if not answers.passed(exercise)), found[0])


# ---------------------------------------------------------------- commands

def run_map(args, course, answers, screen):
    show.course_map(screen, course, answers)
    return 0


def run_check(args, course, answers, screen):
    """Check in order, and stop at the first that hasn't passed."""
    for exercise in chosen(args, course, answers, screen):
        if not check(exercise, args, course, answers, screen):
            return 1
    coming, _ = answers.next()
    if coming is None:
        screen.say("That was the last one.", "good")
    elif args.name is None:
        screen.say(f"  next: {coming.id} {coming.title}")
    return 0


def check(exercise, args, course, answers, screen):
    """Check one answer and say what was found; True if it passed."""
    begin(exercise, course, answers, screen)
    if exercise.kind == "ranks":
        try:
            launcher.mpirun_command()
        except RuntimeError as error:
            raise CourseError(f"{exercise.id} runs on several processes: {error}") from None
    uses, whose = answers.uses(exercise, args.which)
    if whose:
        screen.say("  built upon " + ", ".join(f"{id} ({who})" for id, who in whose.items()), "quiet")
    path = answers.path(exercise)
    sha256 = digest(path)       # what is saved during the check hasn't passed
    found = check_answer(course, exercise, path, uses, args.seed)
    show.verdict(screen, exercise, found, path)
    if found.passed:
        answers.note_passed(exercise, found.seconds, sha256)
        try:
            picture = draw(course, exercise, found, path.parent / "pictures" / f"{exercise.id}.png")
        except OSError:     # of a file that can't be written, which main tells
            raise
        except Exception as error:      # of what nobody has thought that a right answer may give
            picture = None
            screen.say(show.wrapped("  your answer has passed; its picture can't be drawn, by a mistake of the course: "
                                    f"{type(error).__name__}: {error}"), "warn")
        if picture:
            line = f"  picture: {show.near(picture[0])}" + (f": {picture[1]}" if picture[1] else "")
            screen.say(show.wrapped(line))
    return found.passed


def begin(exercise, course, answers, screen):
    """Make the learner's file if it is missing, and say what comes before this chapter."""
    had = answers.known(exercise).get("begun") or answers.passed(exercise)
    if answers.begin(exercise):
        again = " again (it was gone; progress is kept)" if had else ""
        screen.say(f"made {show.near(answers.path(exercise))}{again}: write your answer there", "strong")
        answers.note(exercise, begun=True)
    chapter = course.chapter(int(exercise.id[:2]))
    missing = [n for n in chapter.needs for other in course.chapters if other.number == n
               and not all(answers.passed(e) for e in other.exercises)]
    if missing and exercise is chapter.exercises[0]:
        names = ", ".join(map(str, missing))
        screen.say(f"  note: this chapter builds on {names}, which you haven't finished; go on if you like", "warn")


def run_watch(args, course, answers, screen):
    """Check whenever the file changes, until everything that was meant has passed or Ctrl-C."""
    while True:
        if args.name is None:
            exercise, why = answers.next()
        else:
            exercise, why = next((e for e in course.find(args.name) if not answers.passed(e)), None), ""
        if exercise is None:
            screen.say("All passed.", "good")
            return 0
        begin(exercise, course, answers, screen)
        screen.clear()
        if why:
            screen.say(f"{exercise.id}: {why}", "quiet")
        screen.say(f"{show.bar(sum(map(answers.passed, course.all_exercises)), len(course.all_exercises))}", "quiet")
        seen = stamp(answers.path(exercise))
        if not check(exercise, args, course, answers, screen):
            screen.say(f"  watching; save the file to check again, Ctrl-C ends. (hint {exercise.id} in another window)",
                       "quiet")
            while stamp(answers.path(exercise)) == seen:
                time.sleep(LOOK_EVERY)
            if stamp(answers.path(exercise)) is None:
                time.sleep(LOOK_EVERY)      # for editors that take the old file away before they write


def stamp(path):
    """What changes when a file is saved."""
    try:
        found = path.stat()
        return found.st_mtime_ns, found.st_size
    except FileNotFoundError:
        return None


def hints(course, exercise):
    """The steps of hints.md, as texts."""
    text = (course.exercises / exercise.folder / "hints.md").read_text(encoding="utf-8")
    section = re.search(rf"^## {re.escape(exercise.id)}\s*$(.*?)(?=^## |\Z)", text, re.M | re.S)
    return re.findall(r"^\d+\. (.*?)(?=^\d+\. |\Z)", section[1], re.M | re.S) if section else []


def run_hint(args, course, answers, screen):
    exercise = one(args, course, answers, screen)
    steps = hints(course, exercise)
    shown = min(answers.known(exercise).get("hints", 0) + 1, len(steps))
    answers.note(exercise, hints=shown)
    screen.say(f"{exercise.id} {exercise.title}", "strong")
    for number, step in enumerate(steps[:shown], 1):
        lines = [line.strip() for line in step.strip().splitlines()]
        screen.say(f"  {number}. " + "\n     ".join(lines), None if number == shown else "quiet")
    screen.say(f"  ({shown} of {len(steps)} hints" + ("; the next call shows one more)" if shown < len(steps) else ")"),
               "quiet")
    return 0


def run_solution(args, course, answers, screen):
    exercise = one(args, course, answers, screen) if args.name is None else course.find(args.name)[0]
    if not answers.passed(exercise) and not args.give_up:
        screen.say(f"{exercise.id} hasn't passed yet. A hint: {show.command()} hint {exercise.id}\n"
                   f"To see ours all the same: {show.command()} solution {exercise.id} --give-up", "warn")
        return 1
    path = answers.solution(exercise)
    if not path.is_file():
        raise CourseError(f"there is no {path} in this copy of the course")
    if not answers.passed(exercise):
        answers.note(exercise, gave_up=True)
    ours = path.read_text(encoding="utf-8").splitlines()
    mine = answers.path(exercise)
    theirs = mine.read_text(encoding="utf-8-sig", errors="replace").splitlines() if mine.is_file() else \
        answers.skeleton(exercise).read_text(encoding="utf-8").splitlines()
    if theirs == ours:
        screen.say(f"your {exercise.id} is ours, line by line")
    styles = {"+": "good", "-": "bad", "@": "quiet"}
    for line in difflib.unified_diff(theirs, ours, "yours", "ours", lineterm="", n=3):
        screen.say(line, styles.get(line[:1]))
    return 0


def run_reset(args, course, answers, screen):
    found = chosen(args, course, answers, screen)
    if len(found) > 1:
        raise CourseError(f"reset takes one exercise at a time: {', '.join(exercise.id for exercise in found)}")
    backup = answers.reset(found[0])
    screen.say(f"{show.near(answers.path(found[0]))} begins anew; what you had is in {show.near(backup)}")
    return 0
