"""What training programs share: a step, a run's files, progress for people, and a clean stop.

The loop itself stays in the programs (mnist_demo/train.py, examples/gpt.py), where one wants to read it.
"""

import argparse
import hashlib
import json
import os
import platform
import resource
import signal
import sys
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

from . import backend, ledger, optim
from .autodiff.primitive import lower
from .backend import xp
from .data.loader import cut
from .launch_env import launched_rank
from .parallel import BinaryCounter
from .parallel.exact import check_shape
from .timeline import trace
from .viz import timeline as timeline_picture

ECHO_SECONDS = 0.5


def train_step(model, optimizer, batch, loss_sum, world, *, seed, step, units=1, clip=None, micro_shards=8,
               accumulate=1, stop=False):
    """One optimizer step on a global batch.

    model      a DistributedDataParallel; the batch is moved to its device
    loss_sum   loss_sum(model, shard) -> the SUM of the shard's losses, a one-element Tensor
    units      losses per sample (1 for images, tokens for text): the sum is divided by batch.count · units
    clip       the gradients' greatest norm, or clip(model), which sees to it
    accumulate run the rank's rows in so many pieces, one after another, to hold fewer activations; the gradients are
               reduced once, after the last
    stop       this rank wants to end; as soon as one does, all learn of it in the same step

    Returns (the global batch's mean loss, whether some rank wants to stop), equal on all ranks.
    """
    optimizer.zero_grad()
    device = next(model.parameters()).device
    total = BinaryCounter()
    scale = 1 / (batch.count * units)
    if accumulate > 1 and model.exact:
        raise ValueError(f"accumulate={accumulate} in exact mode, which runs one micro-shard at a time by itself: "
                         "raise micro_shards instead")
    for shard in batch.shards:      # one per rank; in exact mode, this rank's micro-shards
        pieces, loss = cut(shard, accumulate), 0.0
        for i, piece in enumerate(pieces):
            with (model.no_sync() if i + 1 < len(pieces) else nullcontext(),
                  backend.random_scope(seed, step, batch.count, piece.rows, micro_shards)):
                losses = loss_sum(model, piece.to(device))
                (losses * scale).backward()
            loss += losses.item()
        total.add(xp.array([loss, float(stop)]))
    if callable(clip):
        clip(model)
    elif clip is not None:
        optim.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    sums = total.total()
    world.all_reduce(sums, exact=model.exact)
    return float(sums[0]) * scale, bool(sums[1])


@contextmanager
def usage_errors(program):
    """What can't be run, found before anything has begun (ValueError, OSError): one line from rank 0, status 2.

    All ranks find the same. One that is alone with its error ends the job, and says it itself (comm/guard.py).
    """
    try:
        yield
    except (ValueError, OSError) as error:
        if launched_rank() == 0:
            print(f"{program}: {in_words(error)}", file=sys.stderr, flush=True)
        raise SystemExit(2) from error


def in_words(error):
    """An error's message; of one of the system, the file and what is wrong with it, without its number."""
    named = isinstance(error, OSError) and error.filename and error.strerror
    return f"{error.filename}: {error.strerror}" if named else str(error)


# What a number must be, and whether it is.
AT_LEAST_1 = "at least 1", lambda value: value >= 1
AT_LEAST_0 = "at least 0, and finite", lambda value: 0 <= value < float("inf")
MORE_THAN_0 = "more than 0", lambda value: value > 0
PROBABILITY = "a probability, at least 0 and less than 1", lambda value: 0 <= value < 1


class Help(argparse.RawDescriptionHelpFormatter):
    """The description as it stands, and after each option its default, where it has one and doesn't say it itself."""

    def _get_help_string(self, action):
        none = any(action.default is nothing for nothing in (None, False, argparse.SUPPRESS))
        return action.help if none or "default" in action.help else f"{action.help} (default: %(default)s)"


class ArgumentParser(argparse.ArgumentParser):
    """argparse's, of which rank 0 alone speaks. Parse after comm.world(), which makes the ranks end together."""

    def __init__(self, **options):
        super().__init__(formatter_class=Help, **options)

    def check_ranges(self, args, ranges):
        """End with a message at a number (None: not given) that isn't as it must be; ranges: {rule: its options}."""
        for (rule, fits), names in ranges.items():
            for name in names:
                value = getattr(args, name)
                if value is not None and not fits(value):
                    self.error(f"--{name.replace('_', '-')} {value}: must be {rule}")

    def widths(self, hidden):
        """What --hidden says, as a list of integers."""
        try:
            widths = [int(width) for width in hidden.split(",") if width]
        except ValueError:
            self.error(f"--hidden {hidden!r}: widths are whole numbers separated by commas, like 512,512")
        if min(widths, default=1) < 1:
            self.error(f"--hidden {hidden!r}: widths must be at least 1")
        return widths

    def _print_message(self, message, file=None):
        if launched_rank() == 0:
            super()._print_message(message, file)


def take_device(name, world):
    """Make the device `name` current for this rank, and return its full name. Of "cuda" the ranks of a node take the
    node's GPUs in turn; there may be more ranks than GPUs. ValueError where there is no such device. Collective."""
    try:
        if name != "cuda":
            return backend.use(name)
        gpus = backend.load_cupy().cuda.runtime.getDeviceCount()
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"device {name}: {error}") from error
    nodes = world.all_gather_object(platform.node())
    return backend.use(f"cuda:{nodes[:world.rank].count(platform.node()) % gpus}")


def decay_groups(model, weight_decay):
    """Two groups for an optimizer: weight decay for matrices, none for vectors (biases, norms)."""
    params = list(model.parameters())
    return [{"params": [p for p in params if p.ndim > 1], "weight_decay": weight_decay},
            {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0}]


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

    def said(self, run, steps):
        """The line that says where the run was broken off."""
        return f"interrupted after step {run.step:,} of {steps:,}: saving what there is"


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


class Run:
    """A run's folder: history.jsonl grows by a line per step; summary.json and parameters.npz come at the end.

    Rank 0 writes. A run that breaks off leaves no summary behind, nor that of an earlier one. Inside `with`, the ledger
    counts. Making a Run is collective; OSError on every rank where the folder can't be written.
    """

    def __init__(self, folder, world):
        self.folder, self.world = Path(folder), world
        if error := world.broadcast_object(self._clear() if world.rank == 0 else None):
            raise error
        self.step = self.samples = 0
        self.busy = 0.0         # seconds spent in steps
        self.history = None

    def _clear(self):
        """Make the folder ready; the OSError where it can't be."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "history.jsonl").open("a").close()       # before anything is deleted
            for name in ("summary.json", "parameters.npz", "trace.json", "timeline.png"):
                (self.folder / name).unlink(missing_ok=True)
        except FileExistsError as error:
            return OSError(error.errno, "is a file, and a run needs a folder", str(self.folder))
        except OSError as error:
            return OSError(error.errno, f"the run's files can't be written here: {error.strerror}", str(self.folder))
        return None

    def __enter__(self):
        if self.world.rank == 0:
            self.history = (self.folder / "history.jsonl").open("w", encoding="utf-8")
        self._ledger = ledger.record()
        self.book = self._ledger.__enter__()
        return self

    def __exit__(self, *exc):
        self._ledger.__exit__(*exc)
        if self.history:
            self.history.close()

    def log(self, loss, epoch, count, begin):
        """A step is done: `count` samples, started at time.perf_counter() == begin."""
        self.busy += time.perf_counter() - begin
        self.step, self.samples = self.step + 1, self.samples + count
        self.loss = loss
        if self.history:
            line = {"step": self.step, "epoch": epoch, "loss": loss, "samples": self.samples}
            self.history.write(json.dumps(line) + "\n")

    @property
    def speed(self):
        """Samples per second, evaluation not counted."""
        return self.samples / self.busy if self.busy else 0.0

    def finish(self, network, **facts):
        """Write summary and parameters; returns the summary on all ranks when they are written. RuntimeError unless all
        hold the same bits."""
        summary = {"ranks": self.world.size, **facts, "parameters_sha256": check_replicas(network, self.world),
                   "samples_per_second": self.speed, "steps": self.step, "samples": self.samples,
                   "final_loss": self.loss, "bytes_sent_per_rank": self.book.total_bytes_sent(),
                   "peak_memory_bytes": peak_memory_bytes()}
        if self.world.rank == 0:
            save_parameters(self.folder / "parameters.npz", network)
            _replace(self.folder / "summary.json", lambda f: f.write((json.dumps(summary, indent=1) + "\n").encode()))
        self.world.barrier()    # a rank that ends first by a status other than 0 ends the job, and rank 0's writing
        return summary


def parameters_sha256(model):
    """Digest of all parameters in name order: equal digests, equal bits."""
    digest = hashlib.sha256()
    for _, p in sorted(model.named_parameters()):
        digest.update(p.cpu().numpy().tobytes())
    return digest.hexdigest()


def check_replicas(model, world):
    """parameters_sha256, after making sure that parameters and buffers are the same on all ranks. RuntimeError
    otherwise."""
    digest, buffers = parameters_sha256(model), hashlib.sha256()
    for _, b in model.named_buffers():
        buffers.update(lower(b).tobytes())
    digests = world.all_gather_object((digest, buffers.hexdigest()))
    for i, what in enumerate(("parameters", "buffers")):
        if len({d[i] for d in digests}) > 1:
            raise RuntimeError(f"the ranks hold different {what}: { {rank: d[i] for rank, d in enumerate(digests)} }")
    return digest


def save_parameters(path, model):
    """state_dict as an .npz file; the old file stays until the new one is complete."""
    _replace(Path(path), lambda f: xp.savez(f, **model.state_dict()))


def load_parameters(path, model):
    """Load what save_parameters wrote. KeyError or ValueError where it doesn't fit the model."""
    with xp.load(path, allow_pickle=False) as file:
        model.load_state_dict(dict(file))


def _replace(path, write):
    """Write a file beside `path` and rename it: a reader sees the old one or the new one, never a part."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def peak_memory_bytes():
    """The most memory that this process has had resident. (macOS counts in bytes, Linux in KiB.)"""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def length(args, batches, default_epochs):
    """(epochs, steps) to train for: --epochs or --steps, whichever ends first; `batches` make an epoch."""
    epochs = args.epochs or (-(-args.steps // batches) if args.steps else default_epochs)
    steps = min(args.steps or epochs * batches, epochs * batches)
    return -(-steps // batches), steps


def closing(summary, out):
    """The last line of a program that has trained a classifier: what came out, from its summary."""
    return (f"test accuracy {summary['test_accuracy']:.2f} %, {summary['samples_per_second']:,.0f} samples/s, "
            f"parameters {summary['parameters_sha256'][:12]}, run written to {out}")


def prepare_exact(world, micro_shards=8):
    """Exact mode's conditions: the tree fits the ranks (else ValueError), and BLAS has one thread, because a product
    that is split over threads adds up in another order."""
    from threadpoolctl import threadpool_limits
    check_shape(micro_shards, world.size)
    threadpool_limits(1)
