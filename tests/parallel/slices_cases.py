"""What the ranks do in the tests of sequences that go through a pipeline in slices."""

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, data, ledger, nn
from minitorch_dist.parallel import DistributedDataParallel
from minitorch_dist.parallel.context import context as cp
from minitorch_dist.parallel.pipelines import Pipeline, cut_gpt, schedule_of

from .misuse_cases import error

VOCABULARY, TIME, BATCH = 11, 13, 6


def gpt(**more):
    mt.manual_seed(3)
    return nn.GPT(VOCABULARY, TIME, **{"layers": 2, "heads": 4, "dim": 16, "dtype": np.float64} | more)


def batch_of(inputs=None, labels=None):
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (BATCH, TIME + 1))
    loader = data.Loader(tokens[:, :-1] if inputs is None else inputs, tokens[:, 1:] if labels is None else labels,
                         BATCH, shuffle=False)
    return next(loader.epoch(0))


def loss_sum(logits, labels):
    return nn.cross_entropy(logits, labels, reduction="sum")


def sent(slices, lengths):
    """(bytes, live slices, the loss) of a second step, whose stages know what comes."""
    world = comm.world()
    pipeline = Pipeline([cut_gpt(gpt(layers=world.size), world.size)[world.rank]], world,
                        schedule_of("1f1b", world.size, 2, slices=slices), lengths)
    pipeline.run(batch_of(), loss_sum, seed=0, step=0)
    with ledger.record() as book:
        loss = pipeline.run(batch_of(), loss_sum, seed=0, step=0, units=TIME)
    return book.bytes_sent["world", "send"], pipeline.live, loss


def attention(**more):
    return nn.MultiHeadAttention(16, 4, **{"causal": True} | more)


STAGES = {
    "not causal": lambda: nn.Sequential(attention(causal=False)),
    "weights dropped": lambda: nn.Sequential(attention(dropout=0.5)),
    "another sequence": lambda: nn.Sequential(nn.CrossAttention(16, 4)),
    "batch norm": lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm(4)),
    "convolution": lambda: nn.Sequential(nn.Conv1d(3, 4, 3)),
    "capacity": lambda: nn.Sequential(nn.MoE(16, 32, 4)),
    "balance": lambda: nn.Sequential(nn.MoE(16, 32, 4, capacity_factor=None, group=None)),
}


def refused(name):
    """What each rank is told where the last one's stage is such a one."""
    world = comm.world()
    alone = world.split(world.rank)
    if name == "exact":
        stage = DistributedDataParallel(nn.Sequential(attention()), alone, exact=True, micro_shards=2)
    elif name == "divided":
        stage = cp.context_parallel(nn.Sequential(attention()), world)
    else:
        stage = STAGES[name]() if world.rank == world.size - 1 else nn.Sequential(nn.Linear(16, 16))
    return error(lambda: Pipeline([stage], world, schedule_of("1f1b", world.size, 2, slices=3)))
