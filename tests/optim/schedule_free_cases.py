"""What the ranks do in the tests of the schedule-free optimizer."""

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, data, nn, optim, training
from minitorch_dist.parallel import DistributedDataParallel, full_state_dict, fully_shard
from minitorch_dist.parallel.fsdp.fully_sharded import FullySharded

SETTINGS = {"lr": 0.02, "warmup": 3, "weight_decay": 0.01}


def images():
    rng = np.random.default_rng(4)
    return rng.standard_normal((60, 9)), rng.integers(0, 4, 60)


def network(dtype):
    mt.manual_seed(3)
    return nn.Sequential(nn.Linear(9, 13, dtype=dtype), nn.ReLU(), nn.Linear(13, 4, dtype=dtype))


def loss_sum(model, shard):
    return nn.cross_entropy(model(shard.inputs), shard.labels, reduction="sum")


def wrapped(way, world, dtype=np.float64, exact=False):
    if way in (1, 2, 3):
        return fully_shard(network(dtype), world, stage=way)
    return network(dtype) if way == "plain" else DistributedDataParallel(network(dtype), world, exact=exact)


def values(model):
    state = full_state_dict(model) if isinstance(model, FullySharded) else model.state_dict()
    return {name: np.array(v) for name, v in state.items()}


def trained(way):
    """(the parameters, the mean, the losses of the mean after each epoch)"""
    world, (x, labels) = comm.world(), images()
    model = wrapped(way, world)
    optimizer, losses = optim.AdamWScheduleFree(model.parameters(), **SETTINGS), []
    loader = data.Loader(x, labels, 14, seed=2, rank=world.rank, size=world.size)      # the last batch has 4
    for epoch in range(4):
        for step, batch in enumerate(loader.epoch(epoch)):
            if way == "plain":
                optimizer.zero_grad()
                for shard in batch.shards:
                    (loss_sum(model, shard) / batch.count).backward()
                optimizer.step()
            else:
                training.train_step(model, optimizer, batch, loss_sum, world, seed=0, step=5 * epoch + step)
        with optimizer.averaged(model), mt.no_grad():
            losses.append(float(nn.cross_entropy(model(x), labels).numpy()))
            mean = values(model)
        if way == "resumed":
            saved, whole = optimizer.state_dict(), values(model)
            model = wrapped("ddp", world)
            model.load_state_dict(whole)
            optimizer = optim.AdamWScheduleFree(model.parameters())
            optimizer.load_state_dict(saved)
    return values(model), mean, losses


def exact():
    """The bits of the parameters, and of their mean, in exact mode."""
    world, (x, labels) = comm.world(), images()
    model = wrapped("ddp", world, np.float32, exact=True)
    optimizer = optim.AdamWScheduleFree(model.parameters(), **SETTINGS)
    loader = data.Loader(x.astype(np.float32), labels, 14, seed=2, rank=world.rank, size=world.size, micro_shards=8)
    for step, batch in enumerate(loader.epoch(0)):
        training.train_step(model, optimizer, batch, loss_sum, world, seed=0, step=step)
    with optimizer.averaged():
        mean = [v.tobytes() for v in values(model).values()]
    return mean, [v.tobytes() for v in values(model).values()]
