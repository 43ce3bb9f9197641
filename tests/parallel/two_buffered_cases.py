"""What the ranks do in the tests of PipeDream-2BW. What must hold is checked by the parent process."""

from contextlib import nullcontext

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, data, ledger, nn, optim
from minitorch_dist.backend import random_scope
from minitorch_dist.data.loader import cut
from minitorch_dist.parallel import DistributedDataParallel, fully_shard
from minitorch_dist.parallel.pipelines import PipeDream2BW, Pipeline, cut_sequential
from minitorch_dist.parallel.pipelines.schedules import one_forward_one_backward

from . import plain
from .pipeline_cases import SEED, loader_for, loss_of, model, state

OPTIMIZERS = {"sgd": lambda params: optim.SGD(params, lr=0.1, momentum=0.9),
              "adamw": lambda params: optim.AdamW(params, lr=0.02, weight_decay=0.1)}


def batches_of(count, dp=None):
    """So many batches of 13 rows, of which some are smaller: epochs have a rest."""
    loader = loader_for("f8", 13, dp.rank if dp else 0, dp.size if dp else 1, False)
    return [batch for epoch in range(count) for batch in loader.epoch(epoch)][:count]


def late(calls, micro_batches, name, size=1):
    """(losses, parameters) of one process that keeps W(t-1) beside W(t) in dicts; each call begins with one of them.
    size: of the data parallel ranks, whose batches are cut into so many micro-batches each."""
    whole = model("f8")
    optimizer, losses, step = OPTIMIZERS[name](whole.parameters()), [], 0
    schedule = optim.LambdaLR(optimizer, lambda t: 1 / (1 + t))
    for batches in calls:
        old = None
        for batch in batches:
            now = state(whole)
            with mt.no_grad():
                for key, p in whole.named_parameters():
                    p[...] = (old or now)[key]
            total = 0.0
            for share in cut(batch.shards[0], size):
                for shard in cut(share, micro_batches):
                    with random_scope(SEED, step, batch.count, shard.rows, 8):
                        loss = loss_of(whole(shard.inputs), shard.labels)
                    total += loss.item()
                    (loss * (1 / batch.count)).backward()
            losses.append(total / batch.count)
            with mt.no_grad():
                for key, p in whole.named_parameters():
                    p[...] = now[key]
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            old, step = now, step + 1
    return losses, state(whole)


def train(pp, counts, micro_batches, name, wrapped, remade=False):
    """(losses, this rank's parameters, coords, (live micro-batches, bytes of weights held at most beside the
    parameters)); one call for each of the counts. wrapped: MiB of a bucket, 0 without a wrapper; remade: each layer is
    run anew in backward."""
    mesh = comm.DeviceMesh(dp=-1, pp=pp)
    stage = cut_sequential(model("f8"), pp)[mesh.coords["pp"]]
    if remade:
        for layer in stage.children():
            layer.forward = mt.checkpoint(layer.forward)
    chunk = DistributedDataParallel(stage, mesh["dp"], wrapped, wrapped) if wrapped else stage
    params = list(chunk.parameters())
    optimizer = OPTIMIZERS[name](params) if params else None
    schedule = optim.LambdaLR(optimizer, lambda t: 1 / (1 + t)) if params else None
    pipeline, held = PipeDream2BW(chunk, mesh["pp"], optimizer, micro_batches), []
    taken = pipeline.versions.step

    def step(optimizer):
        taken(optimizer)
        arrays = {id(a): a.nbytes for a in pipeline.versions.before}
        arrays |= {id(flat.params): flat.params.nbytes for flat in pipeline.versions.flats}
        held.append(sum(arrays.values()) - sum(flat.params.nbytes for flat in pipeline.versions.flats))
    pipeline.versions.step = step
    losses, at, batches = [], 0, batches_of(sum(counts), mesh["dp"])
    for count in counts:
        for p in params:        # of a backward that nobody has taken a step of: none of train's batches
            p.grad = mt.tensor(np.ones(p.shape, p.dtype))
        losses += pipeline.train(batches[at:at + count], loss_of, seed=SEED, step=at, over=mesh["dp"],
                                 scheduler=schedule)
        at += count
        assert pipeline.versions.before is None
    weights = sum(flat.params.nbytes for flat in pipeline.versions.flats)
    return losses, state(chunk), mesh.coords, pipeline.live, max(held) if held else 0, weights


def messages(count, micro_batches):
    """What this rank sends along the pipeline: of `count` batches without a pause, and batch by batch with a flush."""
    world, found = comm.world(), []
    for kind in (PipeDream2BW, Pipeline):
        stage = cut_sequential(model("f8"), world.size)[world.rank]
        optimizer, batches = OPTIMIZERS["sgd"](stage.parameters()), batches_of(count)
        with ledger.record() as book:
            if kind is PipeDream2BW:
                kind(stage, world, optimizer, micro_batches).train(batches, loss_of, seed=SEED, step=0)
            else:
                pipeline = kind([stage], world, one_forward_one_backward(world.size, micro_batches))
                for step, batch in enumerate(batches):
                    pipeline.run(batch, loss_of, seed=SEED, step=step)
                    optimizer.step()
                    optimizer.zero_grad()
        key = world.name, "send"
        found.append((book.calls[key], book.bytes_sent[key]))
    return found


def refused(what):
    """The error's text."""
    world = comm.world()
    stages = cut_sequential(model("f4" if what == "exact" else "f8"), world.size)
    stage, micro_batches = stages[world.rank], 4
    alone = world.split(world.rank)
    if what == "exact":
        stage = DistributedDataParallel(stage, alone, exact=True)
    elif what == "zero":
        stage = fully_shard(stage, alone, 1) if world.rank == 1 else stage
    elif what == "tied":
        shared = nn.Linear(plain.FEATURES, plain.FEATURES, dtype="f8")
        stage = cut_sequential(nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh()), world.size,
                               [1] * 4)[world.rank]
    elif what == "statistics":
        stage = cut_sequential(model("f8", norms=True), world.size)[world.rank].train(world.rank == 0)
    elif what == "few":
        micro_batches = world.size - 1
    try:
        pipeline = PipeDream2BW(stage, world, OPTIMIZERS["sgd"](stage.parameters()), micro_batches)
        batches = batches_of(2 + (what == "rows") * world.rank)
        if what == "shapes":
            batches += data.Loader(np.ones((13, 2, plain.FEATURES)), np.zeros((13, 2), int), 13).epoch(0)
        pipeline.train(batches, None if what == "loss" else loss_of, seed=SEED, step=0,
                       over=world if what == "statistics" else None)
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def mixed():
    """(losses, this rank's parameters) of calls in other precisions; and by a pipeline made anew for each."""
    world, found = comm.world(), []
    for anew in (False, True):
        stage, losses, pipeline = cut_sequential(model("f4"), world.size)[world.rank], [], None
        optimizer = OPTIMIZERS["sgd"](stage.parameters())
        for step, dtype in enumerate((None, "bfloat16", "float16", None)):
            if anew or pipeline is None:
                pipeline = PipeDream2BW(stage, world, optimizer, 3)
            x, labels = plain.dataset()
            batch, = data.Loader(x[:13].astype("f4"), labels[:13], 13).epoch(0)
            with nullcontext() if dtype is None else mt.autocast(dtype):
                losses += pipeline.train([batch], loss_of, seed=SEED, step=step)
        found.append((losses, state(stage)))
    return found


def thawed():
    """This rank's parameters, of a pipeline that goes on when its biases are thawed; and of one that is made anew."""
    world, found = comm.world(), []
    for anew in (False, True):
        stage = cut_sequential(model("f8"), world.size)[world.rank]
        weights, biases = ([p for p in stage.parameters() if (p.ndim > 1) == matrices] for matrices in (True, False))
        for p in biases:
            p.requires_grad_(False)
        optimizer = OPTIMIZERS["sgd"](weights)
        pipeline = PipeDream2BW(stage, world, optimizer, 3)
        pipeline.train(batches_of(2), loss_of, seed=SEED, step=0)
        for p in biases:
            p.requires_grad_(True)
        pipeline.optimizer = optim.Combined(optimizer, OPTIMIZERS["adamw"](biases))
        if anew:
            pipeline = PipeDream2BW(stage, world, pipeline.optimizer, 3)
        pipeline.train(batches_of(3), loss_of, seed=SEED, step=2)
        found.append(state(stage))
    return found


def broken():
    """What the second call says, after the first one has raised on all ranks."""
    world = comm.world()
    stage = cut_sequential(model("f8"), world.size)[world.rank]
    pipeline = PipeDream2BW(stage, world, OPTIMIZERS["sgd"](stage.parameters()), 3)

    def fails(*args):
        raise ZeroDivisionError
    said = []
    stage.forward = fails
    for kind in (ZeroDivisionError, RuntimeError):
        try:
            pipeline.train(batches_of(1), loss_of, seed=SEED, step=0)
        except kind as error:
            said.append(str(error))
    return said


def empty():
    """Of no batches; and that the parameters are where they were."""
    world = comm.world()
    stage = cut_sequential(model("f8"), world.size)[world.rank]
    pipeline = PipeDream2BW(stage, world, OPTIMIZERS["sgd"](stage.parameters()), 3)
    before = state(stage)
    return pipeline.train([], loss_of, seed=SEED, step=0), all(
        np.array_equal(before[name], value) for name, value in state(stage).items())
