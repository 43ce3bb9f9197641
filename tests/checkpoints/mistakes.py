"""What the ranks do in test_mistakes.py."""

import errno

import numpy as np

import minitorch_dist as mt
from minitorch_dist import checkpoints, comm, nn, optim
from minitorch_dist.parallel import DistributedDataParallel, full_state_dict, fully_shard
from minitorch_dist.parallel.tensor import tensor_parallel as tp

from .cases import FEATURES, Training, loss_sum, mlp


class Mean(nn.Module):
    """Moves a buffer by what this rank alone has seen."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", np.zeros(5))

    def forward(self, x):
        self.seen += 0.1 * x.data.mean()
        return x


def moving_buffers(path):
    """Steps with a Mean, a save, a step more. (rank 0's buffer when it was saved, and at the end; those of a program
    that has loaded it and makes the last step)."""
    world = comm.world()
    x = np.random.default_rng(world.rank).standard_normal((4, FEATURES))

    def made():
        mt.manual_seed(1)
        model = DistributedDataParallel(nn.Sequential(Mean(), nn.Linear(FEATURES, 2, dtype=x.dtype)), world)
        return model, optim.SGD(model.parameters(), 0.1)

    def step(model, optimizer):
        optimizer.zero_grad()
        (model(mt.tensor(x)) ** 2).sum().backward()
        optimizer.step()
    run, again = made(), made()
    for _ in range(3):
        step(*run)
    saved = run[0].module[0].seen.copy()
    checkpoints.save(path, *run, comm=world)
    checkpoints.load(path, *again, comm=world)
    loaded = again[0].module[0].seen.copy()
    step(*run), step(*again)
    step(*run), step(*again)      # whose forward has rank 0's
    return world.broadcast_object(saved), loaded, run[0].state_dict(), again[0].state_dict()


def not_one_model(path, how):
    """save() of what the ranks don't hold alike: the error."""
    world = comm.world()
    mt.manual_seed(world.rank)
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    try:
        checkpoints.save(path, [model[0], model[1]] if how == "chunks" else model, None, None, world)
    except ValueError as error:
        return str(error)
    return "saved"


def several_at_one_path(path, how):
    """Each rank saves there, as if it were alone, a model of its own rank's numbers; at once. What each is told."""
    world = comm.world()
    alone = world.split(world.rank) if how == "split" else None
    model = nn.Linear(30, 20)
    for p in model.parameters():
        p.data[...] = world.rank
    world.barrier()
    try:
        checkpoints.save(path, model, None, {"rank": world.rank}, alone)
    except OSError as error:
        return str(error)
    finally:
        world.barrier()
    return "saved"


def from_two_folders(paths):
    """load() where each rank has a path of its own."""
    world, model = comm.world(), mlp()
    try:
        checkpoints.load(paths[world.rank], model, None, world)
    except checkpoints.CheckpointError as error:
        return str(error)
    return "loaded"


def unknown_to_all(path):
    """Rank 1 has no optimizer, and rank 0's is of a part of what was saved."""
    run = Training("mlp", "data")
    checkpoints.save(path, run.model, run.optimizer, None, run.world)
    few = optim.AdamW([{"params": [run.model.module[3].weight]}, {"params": []}])
    try:
        checkpoints.load(path, run.model, few if run.world.rank == 0 else None, run.world)
    except checkpoints.CheckpointError as error:
        return str(error)
    return "loaded"


def in_the_middle(path, way):
    """Load after the first backward of several of a step, and go on: as from the beginning."""
    run = Training("mlp", "data" if way == "no_sync" else way, exact=way != "no_sync").train(0, 2)
    checkpoints.save(path, run.model, run.optimizer, {"step": 2}, run.world)
    shards = run.batches()[2].shards
    run.optimizer.zero_grad()
    if way == "no_sync":
        with run.model.no_sync():
            loss_sum(run.model, shards[0].to("cpu")).backward()
    else:
        loss_sum(run.model, shards[0].to("cpu")).backward()
    checkpoints.load(path, run.model, run.optimizer, run.world)
    left = [name for name, p in run.model.named_parameters() if p.grad is not None]
    run.train(2, 4)
    return left, full_state_dict(run.model) if way.startswith("stage") else run.model.state_dict()


def of_another_model(path):
    """save() and load() where rank 1 alone has an optimizer of other parameters: the errors."""
    run, found = Training("mlp", "data"), []
    checkpoints.save(path, run.model, run.optimizer, None, run.world)
    optimizer = run.optimizer if run.world.rank == 0 else optim.AdamW([mlp()[3].weight])
    for call, where in (checkpoints.save, f"{path}-never"), (checkpoints.load, path):
        try:
            call(where, run.model, optimizer, comm=run.world)
        except ValueError as error:
            found.append(str(error))
    return found


def damaged(path):
    """load() of a file of which a bit has changed: what is said."""
    run = Training("mlp", "data")
    try:
        checkpoints.load(path, run.model, run.optimizer, run.world)
    except checkpoints.CheckpointError as error:
        return str(error)
    return "loaded"


def unlisted(folder):
    """save() where rank 0 can't list the folder when its checkpoint is there: what is said."""
    there = checkpoints.Checkpoints(folder, comm.world())
    steps = there.steps

    def refused():
        if there.path(1).exists():
            raise OSError(errno.EIO, "no list", folder)
        return steps()
    there.steps = refused
    try:
        there.save(1, DistributedDataParallel(nn.Linear(2, 3), there.comm))
    except OSError as error:
        return error.strerror
    return "saved"


def behind_a_load(path):
    """In each stage, by both ways of loading: what a backward says whose forward was before it. All of the weight is
    rank 0's piece."""
    world, found = comm.world(), []

    def made():
        mt.manual_seed(3)
        return nn.Linear(4, 4)
    checkpoints.save(path, made(), comm=world)
    for stage in (1, 2, 3):
        for load in (lambda model: checkpoints.load(path, model, comm=world),
                     lambda model: model.load_state_dict(made().state_dict())):
            model = fully_shard(made(), world, stage)
            loss = mt.sum(model(mt.tensor(np.ones((2, 4), np.float32), requires_grad=True)))
            load(model)
            try:
                loss.backward()
            except RuntimeError as error:
                found.append(str(error))
            world.barrier()
    return found


def inside_gathered(path):
    """load() where whole values are looked at."""
    run = Training("mlp", "stage 3")
    checkpoints.save(path, run.model, run.optimizer, None, run.world)
    with run.model.gathered():
        try:
            checkpoints.load(path, run.model, run.optimizer, run.world)
        except RuntimeError as error:
            return str(error)
    return "loaded"


def frozen_parts(path):
    """Heads over the ranks, with frozen matrices and biases: what is trained, before and after."""
    world, model = comm.world(), mlp()
    for i in (0, 5):
        for p in model[i].parameters():
            p.requires_grad_(False)
    names = {name: p.requires_grad for name, p in model.named_parameters()}
    tp.parallelize_module(model, world, {"0": "column", "3": "row", "5": "column"})
    checkpoints.save(path, model, None, None, world)
    return names, {name: p.requires_grad for name, p in model.named_parameters()}
