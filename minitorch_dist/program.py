"""What training programs share on their outside: the command line, errors in words, progress, a clean stop, a trace."""

import argparse
import os
import platform
import signal
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

from . import attempt, backend, faults
from .backend import xp
from .comm.together import together
from .launch_env import is_rank, launched_rank, launched_size, no_traceback_of_ctrl_c
from .nn.windows import read_windows
from .timeline import trace
from .viz import timeline as timeline_picture

ECHO_SECONDS = 0.5


@contextmanager
def usage_errors(program):
    """What can't be run, found before anything has begun (ValueError, OSError, or sizes that no memory has room for):
    one line from rank 0, status 2.

    All ranks find the same. One that is alone with its error ends the job, and says it itself (comm/guard.py).
    """
    try:
        yield
    except BrokenPipeError:     # see reader_may_leave
        raise
    except (ValueError, OSError, MemoryError) as error:
        if launched_rank() == 0:
            print(f"{program}: {in_words(error)}", file=sys.stderr, flush=True)
        raise SystemExit(2) from error


@contextmanager
def reader_may_leave():
    """What is printed may be read in part, as by `| head`: the program then ends without a word, with status 1. So does
    one that Ctrl-C ends (which Interrupt, inside, may take for a wish): by the signal, which shells tell as 130."""
    try:
        try:
            with no_traceback_of_ctrl_c():
                yield
        finally:
            if sys.stdout is not None:      # as by >&-
                sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())      # for Python's own flush at the end
        raise SystemExit(1) from None


def one_process(name):
    """End a program that is for one process where a launcher has started several, which would all do the same: rank 0
    says so, and the status is 2."""
    if is_rank():
        if launched_rank() == 0:
            print(f"{name}: is for one process, and here are {launched_size()}: start it without mpirun",
                  file=sys.stderr, flush=True)
        raise SystemExit(2)


def in_words(error):
    """An error's message; of one of the system, the file and what is wrong with it, without its number."""
    if isinstance(error, MemoryError):      # NumPy's says for which array
        return f"{str(error) or 'out of memory'}: take smaller sizes"
    named = isinstance(error, OSError) and error.filename and error.strerror
    return f"{error.filename}: {error.strerror}" if named else str(error)


# What a number must be, and whether it is.
AT_LEAST_1 = "at least 1", lambda value: value >= 1
FINITE_1 = "at least 1, and finite", lambda value: 1 <= value < float("inf")
AT_LEAST_0 = "at least 0, and finite", lambda value: 0 <= value < float("inf")
MORE_THAN_0 = "more than 0", lambda value: value > 0
POSITIVE = "more than 0, and finite", lambda value: 0 < value < float("inf")
SHARE = "a share, above 0 and at most 1", lambda value: 0 < value <= 1
PROBABILITY = "a probability, at least 0 and less than 1", lambda value: 0 <= value < 1

CHECKS = {      # options of checks.py
    "check_replicas": "every so many steps, and before each checkpoint, compare the bits of all ranks' parameters: "
                      "against processors that are wrong and say nothing",
    "check_work": "every so many steps, and before each checkpoint, let all ranks work out one and the same gradient, "
                  "and compare its bits: against those who compute wrongly before the sum",
    "stragglers": "measure how long each rank computes and waits, and say which one is slow over so many steps",
}


class Help(argparse.RawDescriptionHelpFormatter):
    """The description as it stands, and after each option its default, where it has one and doesn't say it itself."""

    def _get_help_string(self, action):
        none = any(action.default is nothing for nothing in (None, False, argparse.SUPPRESS))
        return action.help if none or "default" in action.help else f"{action.help} (default: %(default)s)"


class Sections(argparse.ArgumentParser):
    """argparse's, whose options stand in sections, and which at a mistake names the wanted ones alone where there are
    many. From then on a terminal that can't show all letters shows the others."""

    FEW = 12
    here = None         # the section that options are added to

    def section(self, title):
        """What is added from now on stands under this title."""
        self.here = self.add_argument_group(title)

    def add_argument(self, *names, **options):
        return (self.here.add_argument if self.here else super().add_argument)(*names, **options)

    def parse_known_args(self, *args, **kwargs):
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")        # a terminal without × shows ?
        if self.usage is None and len(self._actions) > self.FEW and all(a.option_strings for a in self._actions):
            wanted = [f"{a.option_strings[0]} {a.metavar or a.dest.upper()}" for a in self._actions if a.required]
            self.usage = " ".join(["%(prog)s", *wanted, "[options]        (--help lists them)"])
        return super().parse_known_args(*args, **kwargs)


class ArgumentParser(Sections):
    """Of which rank 0 alone speaks. Parse after comm.world(), which makes the ranks end together."""

    def __init__(self, **options):
        super().__init__(formatter_class=Help, **options)
        self.checks = []        # options, by add_checks

    def check_ranges(self, args, ranges):
        """End with a message at a number (None: not given) that isn't as it must be; ranges: {rule: its options}."""
        for (rule, fits), names in ranges.items():
            for name in names:
                value = getattr(args, name)
                if value is not None and not fits(value):
                    self.error(f"--{name.replace('_', '-')} {value}: must be {rule}")

    def check_needs(self, args, needs):
        """End with a message at an option that was given, and would change nothing; needs: {what it is for: (whether
        that was asked for, its options)}."""
        for what, (asked, names) in needs.items():
            for name in names:
                value = getattr(args, name)
                if not asked and value != self.get_default(name):
                    self.error(f"--{name.replace('_', '-')} {value}: is for {what} alone, and would change nothing: "
                               "leave it out")

    def add_checkpoints(self):
        """The options of a run that can go on."""
        self.section("checkpoints")
        self.add_argument("--save-every", type=int, metavar="STEPS",
                          help="write a checkpoint every so many steps, and at the end (Ctrl-C writes one in any case)")
        self.add_argument("--async-save", action="store_true",
                          help="write checkpoints beside the training, which waits only until their values are copied")
        self.add_argument("--resume", nargs="?", const=True, default=False, choices=["auto"],
                          help="go on from the newest checkpoint in the run's folder, with the same settings, on any "
                               "number of ranks. auto: where there is none, begin; so that one command does for a job "
                               "that is started again and again (the default under `minitorch-dist supervise`)")

    def add_checks(self, work=True):
        """The options of a run that is checked on its way, by Checks (checks.py), and that faults on purpose strike.
        work: --check-work too, which needs the whole model on every rank."""
        self.section("looked at on the way")
        self.checks = [name for name in CHECKS if work or name != "check_work"]
        for name in self.checks:
            self.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="STEPS", help=CHECKS[name])

    def add_mfu(self):
        """The option of a program that says how much of the hardware it uses (utilization.py)."""
        self.add_argument("--mfu", action="store_true", help="say at the end how much of what the ranks can multiply "
                          "went into the model: model FLOPs utilization")

    def add_spikes(self):
        """The option of a program that leaves out steps that would do harm (optim.SpikeGuard)."""
        self.add_argument("--skip-spikes", type=float, nargs="?", const=6.0, metavar="DEVIATIONS",
                          help="leave out steps whose loss or gradient norm is so many deviations above the last 128 "
                               "steps' (6, if no number is given)")

    def parse_args(self, *args, **kwargs):
        args = super().parse_args(*args, **kwargs)
        self.check_ranges(args, {AT_LEAST_1: self.checks, POSITIVE: ["skip_spikes"] if "skip_spikes" in args else []})
        try:
            if faults.planned() and not self.checks:
                self.error(f"{faults.VARIABLE} is set, and strikes nothing in this program: unset it")
        except ValueError as error:
            self.error(str(error))
        if getattr(args, "resume", None) is False and attempt.is_supervised():
            args.resume = "auto"
        if getattr(args, "resume", None) == "auto" and args.out is None:
            self.error(f"--resume auto{', under a supervisor' * attempt.is_supervised()}: give the run's folder by "
                       "--out; without, other numbers of ranks have others, and would begin")
        return args

    def widths(self, hidden, option="--hidden", fewest=0):
        """What the option says, as a list of integers, at least so many."""
        try:
            widths = [int(width) for width in hidden.split(",") if width]
        except ValueError:
            self.error(f"{option} {hidden!r}: these are whole numbers separated by commas, like 512,512")
        if min(widths, default=1) < 1:
            self.error(f"{option} {hidden!r}: all must be at least 1")
        if len(widths) < fewest:
            self.error(f"{option} {hidden!r}: there must be at least {fewest}")
        return widths

    def windows(self, text):
        """What --window says, as nn.GPT takes it."""
        try:
            return read_windows(text)
        except ValueError as error:
            self.error(str(error))

    def _print_message(self, message, file=None):
        if launched_rank() == 0:
            super()._print_message(message, file)


def make_folder(path, world=None):
    """The folder in which a program writes at its end, made before it begins; None: it writes nothing. OSError where
    there can be none, with world on all its ranks; then collective."""
    def made():
        try:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
        except FileExistsError as error:
            raise OSError(error.errno, "is a file, and a folder is needed", str(path)) from error
        except OSError as error:
            raise OSError(error.errno, f"no file can be written here: {error.strerror}", str(path)) from error
    together(world, made if path is not None and (world is None or world.rank == 0) else lambda: None)


def length(args, batches, default_epochs):
    """(epochs, steps) to train for: --epochs or --steps, whichever ends first; `batches` make an epoch."""
    epochs = args.epochs or (-(-args.steps // batches) if args.steps else default_epochs)
    steps = min(args.steps or epochs * batches, epochs * batches)
    return -(-steps // batches), steps


def warmup(asked, usual, steps):
    """Over how many of the steps the learning rate rises: as --warmup asks, else (None) the usual number, but no more
    than half of the steps. ValueError where it would never have risen."""
    if asked is None:
        return min(usual, steps // 2)
    if asked >= steps:
        raise ValueError(f"--warmup {asked}: the run has {steps} steps, and the rate must have risen before the last: "
                         f"take at most {steps - 1}")
    return asked


def take_device(name, world=None):
    """Make the device `name` current for this rank, and return its full name. Of "cuda" the ranks of a node take the
    node's GPUs in turn; there may be more ranks than GPUs. ValueError where there is no such device. Collective; None:
    one process alone."""
    try:
        if name != "cuda" or world is None:
            return backend.use(name)
        gpus = backend.load_cupy().cuda.runtime.getDeviceCount()
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"device {name}: {error}") from error
    nodes = world.all_gather_object(platform.node())
    return backend.use(f"cuda:{nodes[:world.rank].count(platform.node()) % gpus}")


def closing(summary, out):
    """The last line of a program that has trained a classifier: what came out, from its summary."""
    return (f"test accuracy {summary['test_accuracy']:.2f} %, {summary['samples_per_second']:,.0f} samples/s, "
            f"parameters {summary['parameters_sha256'][:12]}, run written to {out}")


class Interrupt:
    """Ctrl-C, and the SIGTERM that batch systems send before they kill, as a wish: `wanted` becomes True, so that the
    step under way is finished and the run saved. A second signal ends the program at once.

    Some who end a program signal both it and its group (GNU timeout, mpirun's parents): a second SIGTERM within
    ECHO_SECONDS is the first one again.
    """

    def __init__(self):
        self.signal = 0     # the number of the first one
        self.since = None

    @property
    def wanted(self):
        return self.signal != 0

    def __enter__(self):
        self.outer = {number: signal.signal(number, self._wish) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exc):
        for number, handler in self.outer.items():
            signal.signal(number, handler)

    def _wish(self, number, frame):
        if not self.wanted:
            self.signal, self.since = number, time.monotonic()
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        elif self.signal == signal.SIGINT or time.monotonic() - self.since > ECHO_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def status(self, world):
        """What the program ends with on all ranks, whichever was asked to stop: 130 after Ctrl-C, 143 after SIGTERM
        (128 + the signal, as shells have it), 0 where none was. Collective."""
        number = max(world.all_gather_object(int(self.signal)))
        return 128 + number if number else 0

    def agreed(self, world):
        """Whether a rank was asked to stop: all learn of it in the same step. Collective; for loops without train_step,
        which tells."""
        wanted = xp.array([float(self.wanted)])
        world.all_reduce(wanted)
        return bool(wanted[0])

    def said(self, run, steps, goes_on=True):
        """The line that says where the run was broken off."""
        return (f"interrupted after step {run.step:,} of {steps:,}: saving what there is"
                + "; --resume goes on from there" * goes_on)


class Progress:
    """Rank 0's progress bar on a terminal; elsewhere the lines given to `say` only. Lines are never cut or read as
    markup, and go to standard output where that is a file."""

    def __init__(self, world, total):
        self.bar = self.task = None
        self.speaks = world.rank == 0
        if self.speaks and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
            self.bar = Progress(TextColumn("training"), BarColumn(), MofNCompleteColumn(),
                                TextColumn("{task.fields[note]}"), TimeRemainingColumn(), console=Console(stderr=True),
                                redirect_stdout=sys.stdout.isatty())
            self.task = self.bar.add_task("", total=total, note="")

    def __enter__(self):
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *exc):
        if self.bar:
            self.bar.stop()

    def step(self, loss):
        """One step further."""
        if self.bar:
            self.bar.update(self.task, advance=1, note=f"loss {loss:.4f}")

    def say(self, text):
        """A line for people, from rank 0."""
        if self.bar and sys.stdout.isatty():
            self.bar.console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)
        elif self.speaks:
            print(text, flush=True)


class Tracer:
    """Records some steps of a training loop (timeline.py): trace.json and timeline.png in the run's folder.

    steps  a range of step numbers; an empty one records nothing
    """

    def __init__(self, world, folder, steps):
        self.world, self.folder, self.steps, self.open = world, Path(folder), steps, None

    def __enter__(self):
        return self

    def at(self, step):
        """Step number `step` comes next."""
        if self.open is None and step in self.steps:
            self.open = trace(self.world)
            self.timeline = self.open.__enter__()
        elif self.open is not None and step not in self.steps:
            self._close()

    def __exit__(self, kind, error, place):
        if self.open is not None and kind is None:
            self._close()
        elif self.steps and self.open is None and self.world.rank == 0:
            print(f"nothing recorded: a trace begins with step {self.steps[0] + 1}, and the run has ended before",
                  flush=True)

    def _close(self):
        self.open.__exit__(None, None, None)
        self.open, self.steps = None, ()
        if self.world.rank == 0:
            files = [self.folder / name for name in ("trace.json", "timeline.png")]
            self.timeline.save(files[0])
            timeline_picture(self.timeline, files[1])
            print(f"recorded what each rank did: {files[0]}, for ui.perfetto.dev, and {files[1]}\n{self.timeline}",
                  flush=True)
