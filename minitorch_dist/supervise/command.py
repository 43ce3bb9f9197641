"""`python -m minitorch_dist supervise`: start a job, and start it again when it fails."""

import argparse
import re
import shlex
import signal
import sys
import tempfile
import time
from pathlib import Path

from ..attempt import read_steps
from ..program import in_words
from ..testing.ranks import mpirun_command
from .attempts import Attempt, Rule, Start, goodput, next_start
from .job import Job, write

LOOK_EVERY = 0.1        # seconds between two looks at the job
KILLED = re.compile(r"[A-Z][\w ]* \(signal \d+\)|signal \d+ \([\w ]+\)")        # MPICH's words, Open MPI's

EXAMPLE = """example:
  minitorch-dist supervise -n 4,2,1 -- mnist_demo/train.py --exact --save-every 50 --out runs/on

What follows -- is what would follow `mpirun -n 4 python`. The program has to go on by itself from what it has saved:
those here do, by --resume auto, which is their default under this command; so a job that has ended is done, and not
begun again. Ctrl-C and SIGTERM are handed on to the job, and end it; without nohup a terminal that closes does, too.
Status 2, of a command that can't be run, and 130 and 143, of a job that was interrupted, are ends as well; with any
other but 0 the job is started again."""


def add_command(commands):
    """`minitorch-dist supervise`."""
    p = commands.add_parser("supervise", help="start a job, and again when it fails, on fewer ranks if need be",
                            formatter_class=argparse.RawDescriptionHelpFormatter, epilog=EXAMPLE)
    p.add_argument("-n", dest="ranks", type=_numbers, default=(1,), metavar="N[,N…]",
                   help="ranks; with several numbers, those that the program can run on, largest first, of which the "
                        "next is taken when ranks are lost again and again (default: 1)")
    p.add_argument("--max-restarts", type=_at_least_0, default=Rule._field_defaults["max_restarts"], metavar="K",
                   help="of a job that gets no further; the count begins anew when it does (default: %(default)s)")
    p.add_argument("--shrink-after", type=_at_least_1, default=Rule._field_defaults["shrink_after"], metavar="K",
                   help="failures on one number of ranks, after which the next is taken (default: %(default)s)")
    p.add_argument("--grow", action="store_true",
                   help="a job that fails on fewer ranks, but got further, is started on the next more again, for they "
                        "may be back; if it gets no further so, it goes back, and the try isn't counted")
    p.add_argument("--backoff", type=_seconds, default=Rule._field_defaults["backoff"], metavar="SECONDS",
                   help="before the first restart, twice as long before each more that gets no further, a minute at "
                        "most (default: %(default)s)")
    p.add_argument("--grace", type=_seconds, default=30.0, metavar="SECONDS",
                   help="for the job to end after a signal was handed on, before it is killed (default: %(default)s)")
    p.add_argument("--mpirun", type=_command, metavar="COMMAND",
                   help="what starts ranks: 'mpirun -f hosts' (default: the mpirun that is found; none for one rank)")
    p.add_argument("program", nargs=argparse.REMAINDER, metavar="-- program …", help="a Python program and its options")
    p.set_defaults(run=_run, parser=p)


def _numbers(text):
    numbers = tuple(_at_least_1(part) for part in text.split(","))
    if list(numbers) != sorted(set(numbers), reverse=True):
        raise argparse.ArgumentTypeError(f"{text}: largest first, each once, as in 4,2,1")
    return numbers


def _at_least(least, kind):
    def read(text):
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not least <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text}: must be a number, at least {least}")
        return value
    return read


def _command(text):
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None
    if not words:
        raise argparse.ArgumentTypeError("it is empty: give a command, or leave the option out")
    return words


_at_least_0, _at_least_1, _seconds = _at_least(0, int), _at_least(1, int), _at_least(0, float)


def _run(args):
    program = args.program[1:] if args.program[:1] == ["--"] else args.program
    if not program:
        args.parser.error("no program: give it after --, as in -- mnist_demo/train.py --out runs/on")
    rule = Rule(args.ranks, args.max_restarts, args.shrink_after, args.backoff, args.grow)

    def command(ranks):
        launcher = args.mpirun or (mpirun_command() if ranks > 1 else None)
        return [*launcher, "-n", str(ranks), sys.executable, *program] if launcher else [sys.executable, *program]
    try:
        return supervise(command, rule, args.grace)
    except (OSError, RuntimeError) as error:
        print(f"minitorch-dist supervise: {in_words(error)}", file=sys.stderr)
        return 2


def supervise(command, rule, grace=30.0):
    """Run a job to its end, starting it again as the Rule says; the last attempt's status. command(ranks) gives what is
    started, as a list. OSError where that can't be."""
    with tempfile.TemporaryDirectory(prefix="supervise-") as folder, _Signals(grace) as signals:
        return _Supervisor(command, rule, Path(folder), signals).run()


class _Signals:
    """SIGINT and SIGTERM, handed on to the job under way; that of a terminal which has gone (SIGHUP) as SIGTERM, at
    which jobs save. Where SIGHUP is ignored, as under nohup, the job goes on."""

    def __init__(self, grace):
        self.grace, self.job, self.number, self.deadline, self.handed_on = grace, None, 0, None, 0

    def __enter__(self):
        taken = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            taken.append(signal.SIGHUP)
        self.outer = {number: signal.signal(number, self._hand_on) for number in taken}
        return self

    def __exit__(self, *exc):
        for number, handler in self.outer.items():
            signal.signal(number, handler)

    def _hand_on(self, number, frame):
        self.deadline = self.deadline or time.monotonic() + self.grace
        self.number = self.number or number
        if self.job is not None:
            self.handed_on = signal.SIGTERM if number == signal.SIGHUP else number
            self.job.signal(self.handed_on)

    def pause(self, seconds):
        """Wait so long, or until one comes. (No Event, whose lock a handler might find taken by what it interrupts.)"""
        end = time.monotonic() + seconds
        while not self.number and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, LOOK_EVERY))

    def take(self, job):
        """From now on to this job; what came while there was none, too."""
        self.job = job
        if job is not None and self.number and not self.handed_on:
            self._hand_on(self.number, None)


class _Supervisor:
    """The attempts at one job, and the lines that tell of them."""

    def __init__(self, command, rule, folder, signals):
        self.command, self.rule, self.folder, self.signals = command, rule, folder, signals
        self.attempts, self.begin = [], time.monotonic()

    def run(self):
        """The last attempt's status."""
        while isinstance(then := next_start(self.attempts, self.rule), Start) and not self.signals.number:
            if then.pause:
                self.say(f"starts again in {then.pause:g} s")
                self.signals.pause(then.pause)
            if not self.signals.number:
                self.attempts.append(self.attempt(then.ranks))
        status = self.attempts[-1].status if self.attempts else 0
        if isinstance(then, Start):     # but a signal has come, to the job or in the pause before this start
            self.say(f"ended by {signal.Signals(self.signals.number).name}")
            status = status if self.signals.handed_on else 128 + self.signals.number
        elif status:
            self.say("\n".join([then.why, *self.attempts[-1].said * then.tells]))
        if any(attempt.first is not None for attempt in self.attempts):
            self.sum_up()
        return status

    def attempt(self, ranks):
        """Start the job, and wait for its end; the Attempt."""
        number, attempt = len(self.attempts), Attempt(ranks)
        steps = self.folder / f"attempt-{number}"
        self.say(f"start {number + 1}: {ranks} rank{'s' * (ranks > 1)}")
        job = Job(self.command(ranks), steps, number, self.signals.grace)
        try:
            attempt.status = self.wait(job)
        finally:        # an error of the supervisor's own leaves no job behind, either
            job.kill()
            left = job.clear()
            self.signals.take(None)
        attempt.said = job.said()
        attempt.first, attempt.durations, attempt.saved, under_way = read_steps(steps)
        if attempt.status == 0 and under_way:
            self.say("mpirun has ended with status 0, and the run has not come to its end: it counts as 1")
            attempt.status = 1      # Open MPI's, where a machine is lost
        if attempt.status == 1 and self.signals.handed_on and attempt.ends_saved:
            attempt.status = 128 + self.signals.handed_on       # Open MPI's mpirun has 1 for any signal
        if left:
            self.say(f"killed what mpirun had left: {', '.join(map(str, left))}")
        status = attempt.status
        self.say(f"done: {_steps(attempt.last)}" if status == 0 and attempt.last else "done" if status == 0 else
                 f"ended {attempt.place} by status {status}{_signal_in(job)}")
        return attempt

    def wait(self, job):
        """The status of the job, when it has ended; signals are handed on to it, and at the deadline it is killed."""
        self.signals.take(job)
        told = killed = False
        while (status := job.wait(LOOK_EVERY)) is None:
            told = told or self.tell_resumed(job.steps)
            if self.signals.deadline and time.monotonic() > self.signals.deadline and not killed:
                self.say(f"still there {self.signals.grace:g} s after the signal: killed")
                job.kill()
                killed = True
        if not told:
            self.tell_resumed(job.steps)
        return status

    def tell_resumed(self, steps):
        """Say where the job goes on, when it is known; whether it is."""
        first = read_steps(steps).first
        before = max((a.last for a in self.attempts if a.last is not None), default=None)
        if first is not None and (before is not None or first):
            again = "" if before is None else f": {_steps(max(before - first, 0), ' is', ' are')} done again"
            self.say((f"goes on from step {first:,}" if first else "begins anew, for nothing was saved") + again)
        return first is not None

    def sum_up(self):
        """The last line."""
        wall, found = time.monotonic() - self.begin, goodput(self.attempts)
        ranks = " → ".join(str(attempt.ranks) for attempt in self.attempts) or "none"
        self.say(f"goodput {100 * found.counted / wall:.1f} %: {found.counted:.1f} s of {wall:.1f} s in steps that "
                 f"count; {_steps(found.lost, ' was', ' were')} lost ({found.lost_seconds:.1f} s); ranks {ranks}")

    def say(self, text):
        """A line, with the time of day and the seconds since the beginning; one write."""
        when = f"supervise {time.strftime('%H:%M:%S')} {time.monotonic() - self.begin:+8.1f} s  "
        first, *more = text.splitlines()
        text = "\n".join([when + first, *(f"    {line}" for line in more)]) + "\n"
        write(sys.stdout, text.encode(getattr(sys.stdout, "encoding", None) or "utf-8", "replace"))


def _steps(count, one="", more=""):
    return f"{count:,} step{one}" if count == 1 else f"{count:,} steps{more}"


def _signal_in(job):
    """What the launcher says of the signal that has killed a rank."""
    for tail in job.tails:
        for line in tail:
            if found := KILLED.search(line):
                return f", {found[0]}"
    return ""
