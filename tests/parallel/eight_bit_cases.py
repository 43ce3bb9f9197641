"""What the ranks do in the tests of optimizer state of 8 bits. What must hold is checked by the parent process."""

import numpy as np

import minitorch_dist as mt
from minitorch_dist import checkpoints, comm, ledger, nn, optim
from minitorch_dist.parallel import (
    DistributedDataParallel,
    full_optimizer_state_dict,
    fully_shard,
    load_full_optimizer_state_dict,
)
from minitorch_dist.parallel.tensor import tensor_parallel as tp

from . import sharded_cases
from .sharded_cases import Training, digest, full_state_dict

MIDDLE, END = 2, 4


def adamw(bits):
    """Biases keep their float32."""
    def make(model):
        trained = sharded_cases.trained(model)
        return optim.AdamW([{"params": [p for p in trained if p.ndim > 1], "state_bits": bits},
                            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0}], lr=0.01)
    return make


sharded_cases.OPTIMIZERS |= {"8 bits": adamw(8), "32 bits": adamw(32)}


def begin(way, optimizer="8 bits"):
    """A Training in exact mode: way is "ddp", a stage, or "hybrid", stage 3 over pairs of neighbours."""
    from threadpoolctl import threadpool_limits
    threadpool_limits(1)
    world = comm.world()

    def wrap(module):
        if way == "ddp":
            return DistributedDataParallel(module, world, exact=True, bucket_cap_mb=0.02)
        over = {"shard_over": world.split(world.rank // 2)} if way == "hybrid" else {}
        return fully_shard(module, world, 3 if way == "hybrid" else int(way), exact=True, **over)
    return Training("mlp", optimizer, wrap, world, "f4", True, batch=18)


def values(run):
    """{name: array} on rank 0."""
    return run.model.state_dict() if isinstance(run.model, DistributedDataParallel) else full_state_dict(run.model)


def whole_state(run):
    """The optimizer's on rank 0."""
    wrapped = not isinstance(run.model, DistributedDataParallel)
    return full_optimizer_state_dict(run.model, run.optimizer) if wrapped else run.optimizer.state_dict()


def bits_of(run):
    """Of parameters and state, as a digest; None where they aren't."""
    if not (state := values(run)):
        whole_state(run)
        return None
    arrays = {f"{k} {name}": a for k, each in enumerate(whole_state(run)["state"]) for name, a in each.items()}
    return digest(state | arrays)


def curves(ways):
    """{way: digest after some steps}; the state's bytes on this rank, counted, are those of its parameters."""
    found = {}
    for way in ways:
        run = begin(way).run(MIDDLE, clip=0.3)
        with ledger.record(memory=True) as book:
            run.run(1)
        packed = [each for state in run.optimizer.state for each in state.values() if hasattr(each, "codes")]
        assert all(each.nbytes == each.codes.size * 10 // 8 for each in packed) and packed
        assert book.peak["optimizer"] == sum(a.nbytes for state in run.optimizer.state for a in state.values())
        found[way] = bits_of(run)
    return found


def save(path, way, bits):
    run = begin(way, f"{bits} bits").run(MIDDLE)
    checkpoints.save(path, run.model, run.optimizer, comm=run.on)
    return bits_of(run.run(END - MIDDLE))


def go_on(paths, way):
    """{path: digest} of runs of 8 bits that go on, read from disk; and through whole states of rank 0."""
    found = {}
    for path in paths:
        run = begin(way).run(MIDDLE)        # for its place in the data
        checkpoints.load(path, run.model, run.optimizer, comm=run.on)
        found[path] = bits_of(run.run(END - MIDDLE))
    if way != "ddp":
        first, second = (begin(way).run(MIDDLE) for _ in range(2))
        load_full_optimizer_state_dict(second.model, second.optimizer, whole_state(first))
        found["whole"] = bits_of(second.run(END - MIDDLE))
    return found


def tensor_parallel(dim):
    """The whole of a model that all ranks cut among them, after some steps."""
    world, it = comm.world(), model(dim)
    tp.parallelize_module(it, world, tp.plan_of(it))
    return tp.full_state_dict(steps(it))


def model(dim):
    mt.manual_seed(4)
    return nn.Sequential(nn.Embedding(16, dim, "f8"), nn.TransformerBlock(dim, 2, causal=True, dtype="f8", std=0.2),
                         nn.Linear(dim, 5, dtype="f8"))


def steps(model, make=lambda params: optim.AdamW(params, 0.01, state_bits=8), share=1.0):
    """The model after END of them, of each of which this is the rank's share, the others having as much."""
    optimizer, random = make(model.parameters()), np.random.default_rng(3)
    for _ in range(END):
        optimizer.zero_grad()
        y = model(random.integers(0, 16, (3, 7)))
        mt.sum(y * (share * random.standard_normal(y.shape))).backward()
        optimizer.step()
    return model
