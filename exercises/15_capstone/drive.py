"""The training run of train.py in small, once with all pieces and once with each alone among the library's."""

import importlib.util
from pathlib import Path

import numpy as np

from minitorch_dist import data, nn, optim, training
from minitorch_dist.parallel import DistributedDataParallel

spec = importlib.util.spec_from_file_location("mine", Path(__file__).parents[2] / "mnist_demo" / "mine.py")
mine = importlib.util.module_from_spec(spec)
spec.loader.exec_module(mine)


def pieces(learner, inputs, run):
    """{"all" or the name of a place: what came of the run}."""
    found = learner(**run.earlier)
    if not isinstance(found, dict) or set(found) != set(mine.PLACES):
        names = sorted(map(str, found)) if isinstance(found, dict) else type(found).__name__
        raise ValueError(f"pieces gave {names}; expected a dict with {sorted(mine.PLACES)}")
    runs = {place: train(run.comm, {place: found[place]}, inputs) for place in mine.PLACES}
    return runs | {"all": train(run.comm, found, inputs)}


def train(world, pieces, inputs):
    """One run. Its losses by step, this rank's rows by step, and all parameters at the end.

    Without an optimizer among the pieces it is plain gradient descent: Adam would hide a wrong factor in the gradient.
    """
    images, labels, batch_size, (plain, adam) = (inputs[name] for name in ("images", "labels", "batch_size", "rates"))
    plugged = mine.Plugged(pieces)
    world.algorithm = plugged.algorithm("auto")
    try:
        parts = plugged.parts(len(images), batch_size, world.size, inputs["seed"]) or \
            orders(inputs["orders"], world.size)
        loader = data.Loader(images, labels, batch_size, rank=world.rank, size=world.size,
                             parts=samples(parts, len(images)))
        # Small buckets, which are cut anew after the first backward: then parameters move, as in a large model.
        model = DistributedDataParallel(network(inputs["parameters"]), world, bucket_cap_mb=1e-6)
        model.register_comm_hook(one_at_a_time)
        plugged.hook(model)
        optimizer = plugged.optimizer([{"params": list(model.parameters())}], adam) or \
            optim.SGD(model.parameters(), lr=plain)
        losses, rows = [], []
        for epoch in range(inputs["epochs"]):
            rows += [np.asarray(part) for part in parts(world.rank, epoch)]
            for batch in plugged.watch(loader.epoch(epoch)):
                loss, _ = training.train_step(model, optimizer, batch, plugged.loss_sum or loss_sum, world, seed=0,
                                              step=len(losses))
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


def samples(parts, n):
    """`parts` as the loader asks for them; what isn't a list of indices below n is refused."""
    def of(rank, epoch):
        found = [np.asarray(part) for part in parts(rank, epoch)]
        if any(part.size and (part.dtype.kind not in "iu" or part.min() < 0 or part.max() >= n) for part in found):
            raise ValueError(f"the sampler gave numbers that are no samples: 0 to {n - 1}")
        return found
    return of
