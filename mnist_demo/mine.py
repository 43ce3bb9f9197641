"""The places of the training run that pieces of the course can take: what `train.py --mine` and chapter 15 plug in.

Each adapter turns what an exercise asked for into what the library expects there, and no more.
"""

import os
import sys
from pathlib import Path

import numpy as np

from minitorch_dist import viz
from minitorch_dist.autodiff import custom_vjp
from minitorch_dist.autodiff.writes import wrote
from minitorch_dist.data.loader import share

ROOT = Path(__file__).resolve().parents[1]
TOGETHER = "15.1"      # the exercise that says what goes where
PLACES = ("optimizer", "loss", "collective", "gradient_sync", "sampler")


class Optimizer:
    """The exercise's Adam, made as piece(arrays, lr=, weight_decay=, decoupled=), one per group of parameters.

    Parameters move when their gradients are put into other buckets, after the first backward; so the piece gets arrays
    that stay, and what it has written there is copied. The tape is told. As the library's optimizers it has
    `param_groups`, in which a schedule sets each step's "lr".
    """

    def __init__(self, piece, groups, lr, decoupled=False):
        self.param_groups = [{"lr": lr, "weight_decay": 0.0, **g, "params": list(g["params"])} for g in groups]
        self.arrays = [[p.data.copy() for p in g["params"]] for g in self.param_groups]
        self.pieces = [piece(list(arrays), lr=lr, weight_decay=g["weight_decay"], decoupled=decoupled)
                       for g, arrays in zip(self.param_groups, self.arrays, strict=True)]

    def zero_grad(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    def step(self):
        for group, arrays, piece in zip(self.param_groups, self.arrays, self.pieces, strict=True):
            piece.step([np.zeros_like(p.data) if p.grad is None else p.grad.data for p in group["params"]],
                       lr=group["lr"])
            for p, array in zip(group["params"], arrays, strict=True):
                p.data[...] = array
                wrote(p.data, "your optimizer's step")


def loss_sum(piece):
    """loss_sum(model, shard) for training.train_step. The exercise gives the sum and its gradient: a rule by hand."""
    @custom_vjp
    def loss(logits, labels):
        return np.asarray(piece(logits, labels)[0], logits.dtype)

    def forward(logits, labels):
        value, gradient = piece(logits, labels)
        return np.asarray(value, logits.dtype), np.asarray(gradient, logits.dtype)
    loss.defvjp(forward, lambda gradient, cotangent: (gradient * cotangent, None))
    return lambda model, shard: loss(model(shard.inputs), shard.labels)


def collective(piece):
    """A Communicator.algorithm: the exercise's all-reduce gets the wire, under the names that a Communicator has."""
    def yours(wire, x, combine):
        piece(Ends(wire), x, combine)
    return yours


class Ends:
    """rank, size, send, recv, isend and irecv of a wire."""

    def __init__(self, wire):
        self.wire, self.rank, self.size = wire, wire.rank, wire.size

    def send(self, x, dst):
        self.wire.send(x, dst)

    def recv(self, x, src):
        self.wire.recv(x, src)

    def isend(self, x, dst):
        return self.wire.isend(x, dst)

    def irecv(self, x, src):
        return self.wire.irecv(x, src)


class GradientSync:
    """A communication hook of DistributedDataParallel: the exercise's averaging, on each parameter's part of a bucket.

    The piece is called as piece(comm, grads, count, total). What the library leaves in a bucket are this rank's sums
    over its `count` samples, divided by the `total` of all ranks; so `batch` must be the one that is under way.
    """

    batch = None

    def __init__(self, piece):
        self.piece = piece

    def watch(self, batches):
        """The batches, each noted as it begins."""
        for self.batch in batches:
            yield self.batch

    def __call__(self, comm, bucket):
        first, last = self.batch.rows
        grads = [bucket.grads[s.start:s.stop].reshape(s.tensor.shape) for s in bucket.segments]
        self.piece(comm, grads, last - first, self.batch.count)
        comm.all_reduce(bucket.flat.tail)      # how many ranks have used each parameter
        return lambda: None


class Plugged:
    """The places of a training run, with `pieces` {place: piece}. Where there is none, the answer is None, and the
    library's own runs.

    order  a sampler whose batches the library cuts: for the run to compare with
    """

    def __init__(self, pieces, order=None):
        self.pieces, self.order = pieces, order
        self.loss_sum = loss_sum(pieces["loss"]) if "loss" in pieces else None
        self.sync = GradientSync(pieces["gradient_sync"]) if "gradient_sync" in pieces else None

    def algorithm(self, library):
        """For Communicator.algorithm; `library` where there is no piece."""
        return collective(self.pieces["collective"]) if "collective" in self.pieces else library

    def parts(self, n, batch_size, size, seed):
        """For data.Loader."""
        if self.order is not None:
            return even_parts(self.order, n, batch_size, size, seed)
        return parts(self.pieces["sampler"], n, batch_size, size, seed) if "sampler" in self.pieces else None

    def hook(self, model):
        """Let the piece average the gradients of a DistributedDataParallel."""
        if self.sync is not None:
            model.register_comm_hook(self.sync)

    def watch(self, batches):
        return batches if self.sync is None else self.sync.watch(batches)

    def optimizer(self, groups, lr, name="adam"):
        """name: "adam" or "adamw"; the exercise has no other."""
        if "optimizer" not in self.pieces or name not in ("adam", "adamw"):
            return None
        return Optimizer(self.pieces["optimizer"], groups, lr, decoupled=name == "adamw")


def parts(piece, n, batch_size, size, seed):
    """A Loader's `parts`: the exercise's shards."""
    return lambda rank, epoch: piece(n, batch_size, rank, size, seed, epoch)


def even_parts(piece, n, batch_size, size, seed):
    """A Loader's `parts`: the batches that the exercise's shards make together, cut evenly. A sample keeps its place in
    the batch, to which dropout's random numbers belong."""
    def of(rank, epoch):
        of_ranks = [piece(n, batch_size, r, size, seed, epoch) for r in range(size)]
        batches = [np.concatenate(shards) for shards in zip(*of_ranks, strict=True)]
        return [batch[slice(*share(len(batch), rank, size))] for batch in batches]
    return of


# ---------------------------------------------------------------- the learner's run

def of_the_course():
    """(pieces {place: piece}, lines that say whose each is): the learner's where they have passed, else ours."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    from exercises.frame.answers import Answers
    from exercises.frame.child import load_module
    from exercises.frame.course import Course
    folder = os.environ.get("MINITORCH_MINE")
    course = Course(mine=Path(folder).resolve()) if folder else Course()
    answers = Answers(course)
    slots, last = answers.slots(), course.exercise(TOGETHER)
    path, whose = answers.choose(last)
    found = {course.exercise(slot.id).object: slot.piece for slot in slots.values()}
    lines = [(place, slots[place].id, slots[place].whose, slots[place].path) for place in PLACES]
    lines.append(("all together", TOGETHER, whose, path))
    return load_module(path, "pieces_of_the_course").pieces(**found), [
        f"  {place:14} {id}  {'yours' if whose == 'mine' else 'ours '}  {os.path.relpath(path)}"
        for place, id, whose, path in lines]


def compare(mine, library, tolerance):
    """(lines, whether they are one curve) for two runs' folders: losses, parameters, and a picture beside the first."""
    runs = [viz.read_run(folder) for folder in (library, mine)]
    verdict = viz.verdict(runs, tolerance)
    with np.load(mine / "parameters.npz") as a, np.load(library / "parameters.npz") as b:
        distance = max(float(np.abs(a[name] - b[name]).max() / np.abs(b[name]).max()) for name in b.files)
    picture = mine / "curves.png"
    viz.curves(runs, picture, tolerance)
    one = verdict.kind != "different" and distance <= tolerance
    return [verdict.text, f"parameters at the end: relative distance {distance:.1e}, "
            + ("within" if distance <= tolerance else "BEYOND") + f" {tolerance:g}", f"picture: {picture}"], one
