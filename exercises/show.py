"""What the learner sees: colours on a terminal, plain text anywhere else."""

import os
import shutil
import sys
import textwrap
from pathlib import Path

from .frame.course import ROOT
from .frame.launch import PRINTED_LINES

PASSED, NEXT, OPEN = "done", "next", ""
BAR = 24
MARKS = {"good": "bold green", "bad": "bold red", "quiet": "dim", "strong": "bold", "warn": "yellow"}


class Screen:
    """Prints lines. Styles are the names in MARKS; they are shown on a terminal only, and not with NO_COLOR set."""

    def __init__(self, stream=None):
        self.stream = stream or sys.stdout
        self.console = None
        if self.stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
            try:
                from rich.console import Console
                self.console = Console(file=self.stream, highlight=False)
            except ImportError:
                pass

    def say(self, text="", style=None):
        """One line or several."""
        if self.console is None:
            try:
                print(text, file=self.stream, flush=True)
            except UnicodeEncodeError:
                print(text.encode("ascii", "replace").decode(), file=self.stream, flush=True)
        else:
            self.console.print(text, style=MARKS.get(style), markup=False, soft_wrap=True)

    def clear(self):
        if self.console is not None:
            self.console.clear()


def width():
    """Columns to write into: the terminal's, 110 at most."""
    return min(110, shutil.get_terminal_size((100, 24)).columns)


def wrapped(line):
    """A line as several that fit, each but the first indented by two more than it."""
    if len(line) <= width():
        return line
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(line, max(20, width()), subsequent_indent=indent, break_on_hyphens=False)


def bar(done, total):
    """A progress bar of text."""
    full = round(BAR * done / total) if total else 0
    return f"[{'#' * full}{'.' * (BAR - full)}] {done} of {total} exercises"


def course_map(screen, course, answers):
    """The chapters with what is done, and what is next."""
    progress = answers.progress()
    coming, why = answers.next()
    wide = width() >= 60
    room = max(12, min(55, width() - (33 if wide else 15)))      # for titles, beside the other columns
    screen.say(f"{'':10}{'chapter':{room}} {'done':>4}" + f" {'minutes':>7}  needs" * wide, "quiet")
    for chapter in course.chapters:
        passed = sum(bool(progress.get(e.id, {}).get("passed")) for e in chapter.exercises)
        total = len(chapter.exercises)
        state = PASSED if total and passed == total else NEXT if coming and coming.folder == chapter.folder else OPEN
        needs = ", ".join(map(str, chapter.needs)) or "nothing"
        title = chapter.title if len(chapter.title) <= room else chapter.title[:room - 1].rstrip(" ,:") + "…"
        count = f"{passed}/{total}" if total else "read"
        more = f" {chapter.minutes:>7}  {needs}" * wide
        screen.say(f"{state:5}{chapter.number:>3}  {title:{room}} {count:>4}{more}",
                   {PASSED: "good", NEXT: "strong"}.get(state))
    done = sum(bool(progress.get(e.id, {}).get("passed")) for e in course.all_exercises)
    screen.say()
    screen.say("  " + bar(done, len(course.all_exercises)))
    screen.say()
    if coming is None:
        screen.say(f"  All passed. {command()} solution ID compares yours with ours.", "good")
        return
    screen.say(f"  Next: {coming.id} {coming.title} ({why})", "strong")
    screen.say(f"  read   {near(course.exercises / coming.folder / 'README.md')}")
    screen.say(f"  write  {near(answers.path(coming))}"
               + ("" if answers.path(coming).exists() else "   (made by the first check)"))
    screen.say(f"  check  {command()} check, or watch to check on every save; hint for a hint")


def command():
    """What to type here to call the course."""
    return "python -m exercises" if Path.cwd() == ROOT else "minitorch-exercises"


def near(path):
    """A path as it is shortest from here."""
    try:
        return os.path.relpath(path)
    except ValueError:
        return str(path)


def verdict(screen, exercise, found, path):
    """What a check has found."""
    if found.passed:
        screen.say(f"{exercise.id} {exercise.title}: passed ({found.seconds:.1f} s)", "good")
        return
    screen.say(f"{exercise.id} {exercise.title}: not yet", "bad")
    for line in textwrap.wrap(found.message, max(20, width() - 2)) or [""]:
        screen.say("  " + line)
    for line in found.details:
        screen.say(wrapped(line), "quiet")
    for rank, lines in enumerate(found.printed):
        if lines:
            last = f", the last {len(lines)} lines" if len(lines) == PRINTED_LINES else ""
            screen.say(f"  your program printed{f' on rank {rank}' if len(found.printed) > 1 else ''}{last}:", "quiet")
            for line in lines:
                screen.say("    " + "".join(c if c.isprintable() else "·" for c in line[:200]), "quiet")
    again = f"; the same numbers again: --seed {found.seed}" if found.kind == "wrong" else ""
    screen.say(f"  in {near(path)}{again}", "quiet")
