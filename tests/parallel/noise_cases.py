"""What the ranks do in the tests of the gradient noise scale. What must hold is checked by the parent process."""

import contextlib

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, data, ledger, nn, optim, training
from minitorch_dist.parallel import DistributedDataParallel, fully_shard
from minitorch_dist.parallel.comm_hooks import fp16_compress
from minitorch_dist.parallel.noise_scale import GradientNoiseScale
from minitorch_dist.parallel.tensor import tensor_parallel as tp

SHAPES = (7,), (3, 5)
SIZE = 22
SIZES = 5, 1, 7, 3, 2, 4        # of the passes, all ranks together
VOCABULARY, LENGTH = 11, 5


class Rows(nn.Module):
    """The sum of all elements, each times a parameter: a sample's gradient is the sample."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(np.ones(shape)) for shape in SHAPES)

    def forward(self, x):
        return (x[:, :7] @ self.first).sum() + (x[:, 7:].reshape(len(x), 3, 5) * self.second).sum()


def samples(step, count=22):
    """float64 (count, 22), normal: of the mean and the deviations below."""
    return mean() + deviations() * np.random.default_rng([step, 6]).standard_normal((count, SIZE))


def mean():
    return np.linspace(-0.4, 0.6, SIZE)


def deviations():
    return np.linspace(0.5, 2.0, SIZE)


WAYS = {
    "alone": lambda world: Rows(),
    "ddp": lambda world: DistributedDataParallel(Rows(), world),
    "exact": lambda world: DistributedDataParallel(Rows(), world, exact=True, micro_shards=2),
    "exact, 3": lambda world: fully_shard(Rows(), world, 3, exact=True, micro_shards=2),
    **{str(stage): lambda world, stage=stage: fully_shard(Rows(), world, stage) for stage in (1, 2, 3)},
}


def passes(model, noises, x, sizes):
    """This rank's backward passes of samples x, one after another; all measurements see them."""
    group = noises[0].comm
    rank, size = (0, 1) if group is None else (group.rank, group.size)
    ends = np.cumsum((0, *sizes))
    mine = np.array_split(np.arange(len(sizes)), size)[rank]
    for i in mine:
        part = x[ends[i]:ends[i + 1]]
        with model.no_sync() if i != mine[-1] and group is not None and not model.exact else contextlib.nullcontext():
            (model(part) * (1 / len(x))).backward()
        for noise in noises:
            noise.after_backward(len(part))


def measured(way, sizes=SIZES, steps=3):
    """([(trace, square) of each step], state_dict of averages, {what update sent: bytes})."""
    model = WAYS[way](comm.world())
    each, noise, found = GradientNoiseScale(model, decay=0), GradientNoiseScale(model, decay=0.5), []
    for step in range(steps):
        model.zero_grad()
        passes(model, (each, noise), samples(step, sum(sizes)), sizes)
        noise.update()
        with ledger.record() as book:
            each.update()
        found.append((each.trace, each.square))
    return found, noise.state_dict(), dict(book.bytes_sent)


def one_pass():
    """What update says where there was one backward on all ranks together."""
    world = comm.world()
    model = DistributedDataParallel(Rows(), world)
    noise = GradientNoiseScale(model)
    count = 0 if world.rank else 4
    (model(samples(0, count)) * 0.25).backward()
    noise.after_backward(count)
    try:
        noise.update()
    except ValueError as error:
        return str(error)


def experts():
    """What is said of experts that are divided over the ranks."""
    model = nn.Sequential(nn.MoE(8, 16, 4))
    model = tp.parallelize_module(model, comm.world(), {"0": "experts"})
    try:
        GradientNoiseScale(DistributedDataParallel(model, comm.world()))
    except ValueError as error:
        return str(error)


def of_parts(tensor):
    """(trace, square) of a GPT of which `tensor` ranks share each matrix; the others share the samples."""
    mesh = comm.DeviceMesh(dp=-1, tp=tensor)
    mt.manual_seed(4)
    model = nn.GPT(VOCABULARY, LENGTH, layers=1, heads=2, dim=8, dtype=np.float64)
    if tensor > 1:
        tp.parallelize_module(model, mesh["tp"], tp.plan_of(model))
    model = DistributedDataParallel(model, mesh["dp"])
    noise = GradientNoiseScale(model)
    trained(model, noise, mesh.coords["dp"], mesh["dp"])
    return noise.trace, noise.square


def trained(model, noise, rank, group, steps=2, clip=0.1, **options):
    """Some steps of train_step in two pieces per rank, with clipping."""
    tokens = np.random.default_rng(8).integers(0, VOCABULARY, (40, LENGTH + 1))
    loader = data.Loader(tokens[:, :-1], tokens[:, 1:], 10, seed=2, rank=rank, size=group.size)
    optimizer = optim.SGD(model.parameters(), lr=0.1)

    def loss_sum(model, shard):
        return nn.cross_entropy(model(shard.inputs), shard.labels, reduction="sum")
    for step, batch in zip(range(steps), loader.epoch(0), strict=False):
        training.train_step(model, optimizer, batch, loss_sum, group, seed=0, step=step, units=LENGTH, clip=clip,
                            accumulate=2, noise=noise, **options)


def overflows():
    """(steps taken in, the scaler's factor) where sums on the wire are beyond float16, and the parts aren't."""
    world = comm.world()
    mt.manual_seed(4)
    model = DistributedDataParallel(nn.GPT(VOCABULARY, LENGTH, layers=1, heads=2, dim=8), world)
    model.register_comm_hook(fp16_compress)
    noise, scaler = GradientNoiseScale(model), optim.GradScaler(init_scale=2.0 ** 24, comm=world)
    trained(model, noise, world.rank, world, scaler=scaler)
    return noise.steps, scaler.get_scale()


def with_and_without(stage=0):
    """(the parameters' digests without a measurement, with, and what was measured, with and without a loss scale)."""
    world, digests, found = comm.world(), [], []
    for measure, scaler in ((False, None), (True, None), (True, optim.GradScaler(comm=world))):
        mt.manual_seed(4)
        model = nn.GPT(VOCABULARY, LENGTH, layers=1, heads=2, dim=8, dtype=np.float64)
        model = fully_shard(model, world, stage) if stage else DistributedDataParallel(model, world)
        noise = GradientNoiseScale(model) if measure else None
        trained(model, noise, world.rank, world, scaler=scaler)
        digests.append(training.parameters_sha256(model))
        found.append((noise.trace, noise.square) if measure else None)
    return digests, found[1:]
