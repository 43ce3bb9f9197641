"""What the ranks do in the tests of what errors say. What must hold is checked by the parent process."""

from functools import partial

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, data, nn, optim, training
from minitorch_dist.checkpoints import Checkpoints
from minitorch_dist.parallel import DistributedDataParallel
from minitorch_dist.parallel.pipelines import Pipeline
from minitorch_dist.parallel.pipelines.schedules import one_forward_one_backward

from .tensor_misuse_cases import said

X = np.random.default_rng(3).standard_normal((12, 4))
LABELS = np.arange(12) % 3


def loss_sum(model, shard):
    return nn.cross_entropy(model(shard.inputs), shard.labels, reduction="sum")


def hooks():
    """{what a communication hook returns: the error}, of two steps with each."""
    world, found = comm.world(), {}
    for name, hook in {"Work": lambda comm, bucket: comm.all_reduce(bucket.grads, async_op=True),
                       "ndarray": lambda comm, bucket: bucket.grads, "NoneType": lambda comm, bucket: None}.items():
        model = DistributedDataParallel(nn.Linear(4, 3, dtype=np.float64), world)
        model.register_comm_hook(hook)
        found[name] = said(lambda model=model: model(X).sum().backward())
    return found


def adversaries():
    """The error for a discriminator whose own sums of gradients are there when the generator's loss goes through it."""
    world = comm.world()
    judge = DistributedDataParallel(nn.Sequential(nn.Linear(4, 5, dtype="f8"), nn.Tanh(), nn.Linear(5, 1, dtype="f8")),
                                    world)
    maker = DistributedDataParallel(nn.Linear(2, 4, dtype="f8"), world)
    judge(X).sum().backward()
    return said(lambda: judge(maker(X[:, :2])).sum().backward())


class Two(nn.Module):
    def forward(self, x):
        return x, x


def steps():
    """{what is wrong with a step: the error}."""
    world, found = comm.world(), {}
    plain = nn.Linear(4, 3, dtype=np.float64)
    model = DistributedDataParallel(nn.Linear(4, 3, dtype=np.float64), world)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    before = [p.numpy().copy() for p in model.parameters()]
    loader = partial(data.Loader, X, LABELS, 12, seed=1)
    ours, = loader(rank=world.rank, size=world.size).epoch(0)
    everything, = loader().epoch(0)
    step = partial(training.train_step, loss_sum=loss_sum, seed=0, step=0)
    found["plain"] = said(lambda: step(plain, optimizer, ours, world=world))
    found["no world"] = said(lambda: step(model, optimizer, ours, world=None))
    found["everything"] = said(lambda: step(model, optimizer, everything, world=world))
    same = all((p.numpy() == b).all() for p, b in zip(model.parameters(), before, strict=True))
    found["ours"] = said(lambda: step(model, optimizer, ours, world=world))
    return found, same


def a_stage_of_two():
    """Ends with the error for a first stage that gives a pair."""
    world = comm.world()
    stage = nn.Sequential(nn.Linear(4, 4, dtype="f8"), *[Two()] * (world.rank == 0))
    pipeline = Pipeline([stage], world, one_forward_one_backward(world.size, 2))
    batch = next(iter(data.Loader(X, LABELS, 4).epoch(0)))
    pipeline.run(batch, lambda y, labels: y.sum(), seed=0, step=0)


def small_micro_shards():
    """The error of BatchNorm in exact mode for a batch of 9 in 8 micro-shards."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm(3)), comm.world(), exact=True)
    batch, = data.Loader(X[:9].astype(np.float32), LABELS[:9], 9, micro_shards=8, rank=comm.world().rank,
                         size=comm.world().size).epoch(0)
    return said(lambda: [loss_sum(model, shard).backward() for shard in batch.shards])


def saved_by_each(folder):
    """The error of all ranks' saves of one checkpoint, without a Communicator."""
    mt.manual_seed(0)
    return said(lambda: Checkpoints(folder).save(1, nn.Linear(4, 3)))


def loaded_into_another(folder):
    """The error for an AdamW's checkpoint that a run with SGD loads."""
    model = nn.Linear(4, 3)
    Checkpoints(folder).save(1, model, optim.AdamW(model.parameters(), 0.1))
    return said(lambda: Checkpoints(folder).load(model, optim.SGD(model.parameters(), 0.1, momentum=0.9)))


def stages_clipped():
    """(the error for a stage's parameters, the norm of one of them alone and what it is, the pipeline's)."""
    world = comm.world()
    mt.manual_seed(world.rank)
    stage = nn.Linear(4, 4, dtype="f8")
    pipeline = Pipeline([stage], world, one_forward_one_backward(world.size, 2))
    pipeline.run(next(iter(data.Loader(X, LABELS, 4).epoch(0))), lambda y, labels: (y * y).sum(), seed=0, step=0)
    squares = [float((p.grad.numpy() ** 2).sum()) for p in stage.parameters()]
    return (said(lambda: optim.clip_grad_norm_(stage.named_parameters(), 1e9)), optim.clip_grad_norm_(stage.bias, 1e9),
            squares, pipeline.clip_grad_norm_(1e9))
