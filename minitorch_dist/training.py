"""What training programs share on their inside: a step (steps.py), and a run's files, from which it can go on.

The loop itself stays in the programs (mnist_demo/train.py, examples/gpt.py), where one wants to read it; what they
share on their outside is in program.py.
"""

import fcntl
import gc
import hashlib
import json
import os
import resource
import shutil
import sys
import time
import zlib
from contextlib import contextmanager, suppress
from pathlib import Path

from . import attempt, backend, divergence, ledger
from .autodiff.primitive import lower
from .backend import xp
from .checkpoints import CheckpointError, Checkpoints
from .checkpoints.npz import read_npz
from .checkpoints.writing import check_seen
from .comm.together import together
from .parallel.exact import check_shape
from .steps import check_work, train_step  # noqa: F401


def is_cut(model):
    """Whether this rank has parts of the model only: of one that parallelize_module has cut."""
    return any(getattr(type(m), "is_part", False) for m in model.modules())


def decay_groups(model, weight_decay):
    """Two groups for an optimizer: weight decay for matrices, none for vectors (biases, norms). model: a module, or a
    list of parameters."""
    params = list(model.parameters() if hasattr(model, "parameters") else model)
    return [{"params": [p for p in params if p.ndim > 1], "weight_decay": weight_decay},
            {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0}]


class Run:
    """A run's folder: history.jsonl grows by a line per step; summary.json and parameters.npz come at the end;
    checkpoints/ holds the last two of what it can go on from.

    settings    {name: what JSON can hold} of what the curve depends on: a run goes on with the same ones only
    resume      go on from the newest checkpoint (see restore): another number of ranks, and another way of cutting the
                model, is all right. "auto": where there is none, begin
    async_save  write checkpoints beside the training, see Checkpoints
    saves       whether the run will save while it trains: then all ranks must see the folder

    Rank 0 writes the files. Until `with` begins, which is collective, an earlier run's stay as they are, so that what
    doesn't fit costs nothing; a run that breaks off later leaves no summary behind, nor that of an earlier one. Inside
    `with`, the ledger counts; a training that diverges ends the program, with status 1, and leaves all that was saved;
    so does a disk that is full.
    From its making to the end of `with`, or until nobody has the Run any more, no other run can have the folder. Making
    a Run is collective. On every rank: OSError where the folder can't be written; ValueError where there is nothing to
    resume, where an earlier run has left checkpoints and hasn't come to its end, or where another one is under way.
    """

    def __init__(self, folder, world, settings=None, resume=False, async_save=False, saves=False):
        self.folder, self.world, self.settings = Path(folder), world, json.loads(json.dumps(settings or {}))
        self.checkpoints = Checkpoints(self.folder / "checkpoints", world, async_op=async_save)
        self.resume = resume
        self.lock = None            # rank 0's
        error = self._refused() if world.rank == 0 else None
        error, self.resume = world.broadcast_object((error, self.resume))       # the latter: whether it goes on
        if error:
            self.lock = None
            raise error
        if saves:       # before hours of training, none of which could be saved
            together(world, lambda: check_seen(self.folder, world.rank))
        self.step = self.samples = self.resumed_at = 0
        self.busy = 0.0         # seconds spent in steps
        self.sent_before = 0    # bytes, until resumed_at
        self.loss = self.history = self.step_log = None
        self.facts, self.lines = {}, []     # lines: of the history, which stay

    def _refused(self):
        """Why the run can't be in this folder, as an error, or None."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = Lock(self.folder)
            (self.folder / "history.jsonl").open("a").close()
            steps = self.checkpoints.steps()
            if self.resume == "auto":
                self.resume = bool(steps)
            if self.resume and not steps:
                return ValueError(f"--resume: {self.checkpoints.folder} has no checkpoint. Ctrl-C writes one, and "
                                  "--save-every does")
            if steps and not self.resume and not self._ended():
                return ValueError(f"{self.folder} has a run that was broken off, with a checkpoint at step "
                                  f"{steps[-1]:,}: go on with --resume, or take another --out, or delete "
                                  f"{self.checkpoints.folder}")
        except ValueError as error:
            return error
        except FileExistsError as error:
            return OSError(error.errno, "is a file, and a run needs a folder", str(self.folder))
        except OSError as error:
            return OSError(error.errno, f"the run's files can't be written here: {error.strerror}", str(self.folder))
        return None

    def _begin(self):
        """Take away what an earlier run has left and this one doesn't go on from, and open the files."""
        for name in ("summary.json", "parameters.npz", "trace.json", "timeline.png"):
            (self.folder / name).unlink(missing_ok=True)
        if not self.resume and self.checkpoints.folder.is_dir():
            shutil.rmtree(self.checkpoints.folder)
        path = self.folder / "history.jsonl"
        _replace(path, lambda file: file.writelines(self.lines))
        self.history = path.open("a", encoding="utf-8")
        self.step_log = self.checkpoints.step_log = attempt.StepLog(self.step)

    def _ended(self):
        """Whether the folder's run has come to its end."""
        try:
            return not json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))["interrupted"]
        except (OSError, ValueError, LookupError, TypeError):
            return False

    def restore(self, model, optimizer, schedule, scaler=None, **watches):
        """With resume, go to where the newest checkpoint was written: the model, its optimizer, the schedule, the
        scaler and the `watches` (a SpikeGuard, say) as they were saved, `step` and the like, and the history up to
        there, which `with` cuts. Collective. CheckpointError (a ValueError) on every rank where it is damaged, or of a
        run of other settings."""
        if not self.resume:
            return
        facts = self.facts = self.checkpoints.facts()
        if strange := {"settings", "samples", "busy", "loss", "sent"} - set(facts):
            raise CheckpointError(f"--resume: the newest checkpoint in {self.checkpoints.folder} is of no run: it says "
                                  f"nothing of {', '.join(sorted(strange))}")
        then, now = facts["settings"], self.settings
        if other := [f"{name} {then.get(name)!r} (now {now.get(name)!r})" for name in {**then, **now}
                     if then.get(name) != now.get(name)]:
            raise CheckpointError(f"--resume: the checkpoint is of a run with {'; '.join(other)}: give the same "
                                  "settings, or take another --out and start anew")
        self.checkpoints.load(model, optimizer)
        self.step, self.samples, self.busy, self.loss = (facts[name] for name in ("step", "samples", "busy", "loss"))
        self.resumed_at, self.sent_before = self.step, facts["sent"]
        if schedule is not None:
            schedule.go_to(self.step)
        if scaler is not None:
            if "scaler" not in facts:
                raise CheckpointError(f"{self.checkpoints.folder}: step {self.step:,} was saved without a GradScaler: "
                                      "go on without one")
            scaler.load_state_dict(facts["scaler"])
        for name in watches.keys() & facts.keys():
            watches[name].load_state_dict(facts[name])
        together(self.world, self._read_history if self.world.rank == 0 else lambda: None)

    def _read_history(self):
        """What the run had done before the checkpoint. CheckpointError where the file has too little."""
        path = self.folder / "history.jsonl"
        lines = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        if len(lines) < self.step:
            raise CheckpointError(f"{path} has {len(lines)} lines, and the checkpoint is of step {self.step}: was it "
                                  "changed?")
        if odd := [number for number, line in enumerate(lines[:self.step], 1) if not _is_of_step(line, number)]:
            raise CheckpointError(f"{path}, line {odd[0]} isn't that of step {odd[0]}: was it changed?")
        self.lines = lines[:self.step]

    def save(self, model, optimizer, scaler=None, **facts):
        """Write a checkpoint of this step, unless it comes from one. Collective. facts: what else the program wants to
        find in `facts` when it goes on; of what has a state_dict, that."""
        if self.step == self.resumed_at:
            return
        if self.history:        # which must have as many lines
            with _named(self.history.name):
                self.history.flush()
                os.fsync(self.history.fileno())
        facts |= {"scaler": scaler} if scaler is not None else {}
        facts = {name: fact.state_dict() if hasattr(fact, "state_dict") else fact for name, fact in facts.items()}
        self.checkpoints.save(self.step, model, optimizer, samples=self.samples, busy=self.busy, loss=self.loss,
                              settings=self.settings, sent=self.sent, **facts)

    def epochs(self, loader, steps):
        """(epoch, its batches) from where the run stands on, until it has made so many steps."""
        while self.step < steps:
            epoch, start = divmod(self.step, len(loader))
            yield epoch, loader.epoch(epoch, start)

    def due(self, every, steps):
        """Whether a checkpoint is to be written after this step: every so many, and after the last; None: never."""
        return every is not None and (self.step % every == 0 or self.step == steps)

    def __enter__(self):
        together(self.world, self._begin if self.world.rank == 0 else lambda: None)
        self._ledger = ledger.record()
        self.book = self._ledger.__enter__()
        return self

    def __exit__(self, kind, error, place):
        self._ledger.__exit__(kind, error, place)
        try:
            try:
                if self.history:
                    with _named(self.history.name):
                        self.history.close()
            except OSError as unwritten:
                error = error or unwritten
            if isinstance(error, divergence.Diverged):
                self._end_diverged(error)
            if isinstance(error, OSError) and self._is_ours(error.filename):
                self._end_unwritten(error)
        finally:
            if self.history:
                self.step_log.close()
                self.lock.close()

    def _end_diverged(self, error):
        """End the program with what has happened and what is kept; a checkpoint under way is written to its end."""
        with divergence.ends(self.world):
            with suppress(OSError):     # a checkpoint that couldn't be written: its thread has said so
                self.checkpoints.wait()
            steps = self.checkpoints.steps()
            kept = f"the losses until then are in {self.folder / 'history.jsonl'}" + (
                f"; the checkpoint of step {steps[-1]:,} stays, and may already be too far off" if steps else "")
            raise divergence.Diverged(f"{error}\n{kept}") from None

    def _is_ours(self, filename):
        """Whether a file is one that the run writes."""
        return isinstance(filename, str) and Path(filename).is_relative_to(self.folder)

    def _end_unwritten(self, error):
        """End the program where the run's files can't be written, as on a full disk: rank 0 alone learns of the
        history's, and ends the others."""
        if self.world.rank == 0:
            steps = self.checkpoints.steps()
            kept = (f"The checkpoint of step {steps[-1]:,} is whole: --resume goes on from there" if steps else
                    "There is no checkpoint to go on from")
            if (self.folder / "summary.json").exists():
                kept += "; parameters.npz and summary.json are written"
            print(f"{error.filename}: {error.strerror}: the run ends after step {self.step:,}. {kept}",
                  file=sys.stderr, flush=True)
        raise SystemExit(1) from error

    def log(self, loss, epoch, count, begin, **more):
        """A step is done: `count` samples, started at time.perf_counter() == begin. more: what else its line in the
        history says, {name: what JSON can hold}."""
        seconds = time.perf_counter() - begin
        self.busy += seconds
        self.step, self.samples = self.step + 1, self.samples + count
        self.loss = loss
        if self.history:
            line = {"step": self.step, "epoch": epoch, "loss": loss, "samples": self.samples, **more}
            with _named(self.history.name):
                self.history.write(json.dumps(line) + "\n")
            self.step_log.done(seconds)

    @property
    def sent(self):
        """Bytes that this rank has sent; rank 0, as long as the checkpoint is of another process."""
        return self.sent_before + self.book.total_bytes_sent()

    @property
    def speed(self):
        """Samples per second, evaluation not counted."""
        return self.samples / self.busy if self.busy else 0.0

    def finish(self, network, **facts):
        """Write summary and parameters; returns the summary on all ranks when they are written. Where they can't be, as
        on a full disk, or where a checkpoint beside the training couldn't be, the program ends, as it does within
        `with`. RuntimeError unless all ranks hold the same bits."""
        unwritten = None
        try:
            self.checkpoints.wait()
        except OSError as error:        # on all ranks; for what is left there may be room
            unwritten = error
        facts |= {"resumed_at": self.resumed_at} if self.resumed_at else {}
        summary = {"ranks": self.world.size, **facts, "parameters_sha256": check_replicas(network, self.world),
                   "products_made_by": backend.products_made_by(),
                   "samples_per_second": self.speed, "steps": self.step, "samples": self.samples,
                   "final_loss": self.loss, "bytes_sent_per_rank": self.sent,
                   "peak_memory_bytes": peak_memory_bytes()}
        def write():
            save_parameters(self.folder / "parameters.npz", network)
            _replace(self.folder / "summary.json", lambda f: f.write((json.dumps(summary, indent=1) + "\n").encode()))
        # Nobody goes on before: a rank that ends first by a status other than 0 ends the job, and rank 0's writing.
        try:
            together(self.world, write if self.world.rank == 0 else lambda: None)
            if unwritten:
                raise unwritten
        except OSError as error:
            self._end_unwritten(error)
        return summary


def _is_of_step(line, step):
    """Whether a line of a history is whole, and of this step."""
    try:
        record = json.loads(line)
        return record["step"] == step and isinstance(record["loss"], float)
    except (ValueError, LookupError, TypeError):
        return False


class Lock:
    """A folder that is ours alone until it is closed, or nobody has the Lock any more, or this process ends. ValueError
    where it is somebody else's. (A file system without such locks, as some over networks, lets everybody pass.)"""

    handle = None

    def __init__(self, folder):
        self.handle = os.open(folder, os.O_RDONLY)
        if not self.taken():
            gc.collect()        # a Lock that nobody has may still be there, where an exception's traceback is a cycle
            if not self.taken():
                self.close()
                raise ValueError(f"another run is writing into {folder}: take another --out")

    def taken(self):
        """Whether it is ours now."""
        try:
            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def close(self):
        """Let others have it."""
        if self.handle is not None:
            os.close(self.handle)
        self.handle = None

    __del__ = close


def crc32(*arrays):
    """A number by which other values are told, with much likelihood: which data a run is trained on."""
    found = 0
    for array in arrays:
        found = zlib.crc32(xp.ascontiguousarray(array).reshape(-1).view(xp.uint8), found)
    return f"{found:08x}"


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
    """state_dict as an .npz file; the old file stays until the new one is complete. ValueError for a model that is cut
    over ranks: its state here is a part; and for bfloat16, which NumPy can't store."""
    if is_cut(model):
        raise ValueError(f"save_parameters: this rank has parts of the model only, and {path} would lack the others: "
                         "save a checkpoint, or load parallel.tensor.full_state_dict(model) into a whole model")
    if odd := [name for name, array in model.state_dict().items() if backend.is_bfloat16(array.dtype)]:
        raise ValueError(f"save_parameters: {odd[0]} is bfloat16, which an .npz file would lose: save a checkpoint, or "
                         "model.to(np.float32)")
    save_arrays(path, model.state_dict())


def save_arrays(path, arrays):
    """{name: array} as an .npz file; the old file stays until the new one is complete."""
    _replace(Path(path), lambda f: xp.savez(f, **arrays))


def load_parameters(path, model):
    """Load what save_parameters wrote. ValueError, naming the file, where it is damaged or doesn't fit the model."""
    state = read_npz(path)
    try:
        model.load_state_dict(state)
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path} is of another model: {error.args[0]}") from error


def _replace(path, write):
    """Write a file beside `path` and rename it: a reader sees the old one or the new one, never a part. OSError, naming
    `path`, where it can't be written: what there is of it is taken away, for the disk may be full."""
    partial = path.with_name(path.name + ".partial")
    try:
        with _named(path), partial.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def _named(path):
    """Writing says nothing of the file: an OSError of it names `path`."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def peak_memory_bytes():
    """The most memory that this process has had resident. (macOS counts in bytes, Linux in KiB.)"""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def prepare_exact(world, micro_shards=8):
    """Exact mode's conditions: the tree fits the ranks, and all make products by the same code (else ValueError); BLAS
    has one thread, because a product that is split over threads adds up in another order. Collective."""
    from threadpoolctl import threadpool_limits
    check_shape(micro_shards, world.size)
    made_by = world.all_gather_object(backend.products_made_by())
    if other := [rank for rank, code in enumerate(made_by) if code != made_by[0]]:
        raise ValueError(f"exact: products come of {made_by[0]} on rank 0, and of {made_by[other[0]]} on rank "
                         f"{other[0]}: their last bits differ. Install the same on all machines, and where processors "
                         "differ let all take the same kernels, say export OPENBLAS_CORETYPE=Haswell")
    threadpool_limits(1)
