"""Pieces called by themselves; and the training run of train.py in small, with all pieces, and with some that stand
alone among the library's.
"""

import functools
import importlib.util
from pathlib import Path

import numpy as np

from minitorch_dist import data, nn, optim, training
from minitorch_dist.parallel import DistributedDataParallel

spec = importlib.util.spec_from_file_location("mine", Path(__file__).parents[2] / "mnist_demo" / "mine.py")
mine = importlib.util.module_from_spec(spec)
spec.loader.exec_module(mine)


def pieces(learner, inputs, run):
    averaged = []

    @functools.wraps(run.earlier["average_gradients"])
    def average_gradients(*arguments, **named):
        averaged.extend(map(np.size, named["grads"] if "grads" in named else arguments[1]))
        return run.earlier["average_gradients"](*arguments, **named)
    found = learner(**run.earlier | {"average_gradients": average_gradients})
    if not isinstance(found, dict) or set(found) != set(mine.PLACES):
        names = sorted(map(str, found)) if isinstance(found, dict) else type(found).__name__
        raise ValueError(f"pieces gave {names}; expected a dict with {sorted(mine.PLACES)}")
    if found["gradient_sync"] is average_gradients:
        raise TypeError("gradient_sync is average_gradients as it is, which doesn't take (comm, grads, count, total), "
                        "nor the library's shares: it needs a function of yours around it")
    if "calls" in inputs:
        return one_by_one(run.comm, found, inputs) | {"averaged": sum(averaged)}
    return {name: train(run.comm, found if name == "all" else {name: found[name]}, inputs, epochs)
            for name, epochs in inputs["epochs"].items()}


# ---------------------------------------------------------------- one by one

def one_by_one(world, pieces, inputs):
    """The arrays that collective and gradient_sync leave, and what sampler returns."""
    n, batch_size = inputs["samples"], inputs["batch_size"]
    batches = {}
    for name, (seed, epoch, size) in inputs["questions"].items():
        parts = samples(mine.parts(pieces["sampler"], n, batch_size, size, seed), n)
        batches[name] = [parts(rank, epoch) for rank in range(size)]
    reduced = {op: [x.copy() for x in inputs["arrays"]] for op in inputs["ops"]}
    for op, arrays in reduced.items():
        for x in arrays:
            world.all_reduce(x, op=op, algorithm=mine.collective(pieces["collective"]))
    synced = []
    for call in inputs["calls"]:      # in the last one a rank has no samples: one that then stays away misses nothing
        grads = [g.copy() for g in call["grads"]]
        pieces["gradient_sync"](world, list(grads), call["count"], call["total"])
        synced.append(grads)
    return {"synced": synced, "reduced": reduced, "batches": batches}


# ---------------------------------------------------------------- the training run

def train(world, pieces, inputs, epochs):
    """One run. Its losses by step, this rank's rows by step, and all parameters at the end.

    Without an optimizer among the pieces it is plain gradient descent: Adam would hide a wrong factor in the gradient.
    Alone, the optimizer is asked for as AdamW; among all, as Adam.
    """
    images, labels, batch_size, rates = (inputs[name] for name in ("images", "labels", "batch_size", "rates"))
    plugged, rows, losses = mine.Plugged(pieces), [], []
    world.algorithm = plugged.algorithm("auto")
    try:
        parts = plugged.parts(len(images), batch_size, world.size, inputs["seed"]) or \
            orders(inputs["orders"], world.size)
        loader = data.Loader(images, labels, batch_size, rank=world.rank, size=world.size,
                             parts=samples(parts, len(images), rows, world.rank))
        # Small buckets, which are cut anew after the first backward: then parameters move, as in a large model.
        model = DistributedDataParallel(network(inputs["parameters"]), world, bucket_cap_mb=1e-6)
        model.register_comm_hook(one_at_a_time)
        plugged.hook(model)
        groups = [{"params": list(model.parameters()), "weight_decay": inputs["weight_decay"]}]
        optimizer = plugged.optimizer(groups, rates["adam"][0], "adam" if len(pieces) > 1 else "adamw")
        rates = rates["adam" if optimizer else "plain"]
        optimizer = optimizer or optim.SGD(model.parameters())
        for epoch in range(epochs):
            for group in optimizer.param_groups:
                group["lr"] = rates[epoch]
            for batch in plugged.watch(loader.epoch(epoch)):
                loss, _ = training.train_step(model, optimizer, batch, plugged.loss_sum or loss_sum, world, seed=0,
                                              step=len(losses), finite=False)   # what is wrong is the check's to say
                losses.append(loss)
        return {"losses": losses, "rows": rows, "parameters": [p.data.copy() for p in model.module.parameters()]}
    finally:
        world.algorithm = "auto"


def loss_sum(model, shard):
    return nn.cross_entropy(model(shard.inputs), shard.labels, reduction="sum")


def one_at_a_time(comm, bucket):
    """Sum each parameter's gradient alone: their lengths are odd, those of buckets can be divided by any size."""
    for s in bucket.segments:
        comm.all_reduce(bucket.grads[s.start:s.stop])
    comm.all_reduce(bucket.flat.tail)
    return lambda: None


def network(arrays):
    """Linear, ReLU, Linear, with these parameters."""
    model = nn.Sequential(nn.Linear(*arrays[0].shape[::-1], dtype=arrays[0].dtype), nn.ReLU(),
                          nn.Linear(*arrays[2].shape[::-1], dtype=arrays[0].dtype))
    for p, array in zip(model.parameters(), arrays, strict=True):
        p.data[...] = array
    return model


def orders(epochs, size):
    """The library's cut of given orders: epochs[epoch] is a list of global batches."""
    return lambda rank, epoch: [batch[slice(*data.loader.share(len(batch), rank, size))] for batch in epochs[epoch]]


def samples(parts, n, rows=None, me=0):
    """`parts` as the loader asks for them; what isn't a list of indices below n is refused. `rows` gets what rank `me`
    is given."""
    def of(rank, epoch):
        found = [np.asarray(part) for part in parts(rank, epoch)]
        if any(part.size and (part.dtype.kind not in "iu" or part.min() < 0 or part.max() >= n) for part in found):
            raise ValueError(f"the sampler gave numbers that are no samples: 0 to {n - 1}")
        if rows is not None and rank == me:
            rows.extend(found)
        return found
    return of
