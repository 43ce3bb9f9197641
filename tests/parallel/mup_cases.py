"""What the ranks do in the tests of µP. What must hold is checked by the parent process."""

import numpy as np

import minitorch_dist as mt
from minitorch_dist import checkpoints, comm, data, nn, optim, training
from minitorch_dist.optim import mup
from minitorch_dist.parallel import DistributedDataParallel, fully_shard
from minitorch_dist.parallel import full_state_dict as pieces_together
from minitorch_dist.parallel.context import context_parallel, cut_sequence
from minitorch_dist.parallel.pipelines import Pipeline, cut_sequential
from minitorch_dist.parallel.pipelines import full_state_dict as stages_together
from minitorch_dist.parallel.pipelines.schedules import one_forward_one_backward
from minitorch_dist.parallel.sharding import annotate
from minitorch_dist.parallel.tensor import tensor_parallel as tp

VOCABULARY, LENGTH, BATCH, STEPS = 11, 8, 6, 3
OPTIMIZERS = {"adamw": (optim.AdamW, 0.01), "sgd": (optim.SGD, 0.05)}


def gpt(dim):
    return nn.GPT(VOCABULARY, LENGTH, layers=2, heads=2, dim=dim, dtype=np.float64)


def layers(dim):
    return nn.Sequential(nn.Embedding(VOCABULARY, dim, np.float64, 0.02), *(
        nn.TransformerBlock(dim, 2, causal=True, dtype=np.float64) for _ in range(2)),
        nn.Linear(dim, VOCABULARY, dtype=np.float64))


def wide(make=gpt):
    """(a model four times as wide as its base, its Widths)."""
    mt.manual_seed(3)
    model = make(16)
    return model, mup.scale(model, make(4))


def batches(rank, size, micro_shards=1):
    tokens = np.random.default_rng(8).integers(0, VOCABULARY, (BATCH * STEPS, LENGTH + 1))
    return enumerate(data.Loader(tokens[:, :-1], tokens[:, 1:], BATCH, seed=2, rank=rank, size=size,
                                 micro_shards=micro_shards).epoch(0))


def loss_sum(model, shard):
    return nn.cross_entropy(model(shard.inputs), shard.labels, reduction="sum")


def train(way, name):
    """The whole parameters of µP after some steps. way: "ddp", "tensor", "context" or a stage of fully_shard."""
    world, (kind, lr) = comm.world(), OPTIMIZERS[name]
    mesh, (model, widths) = comm.DeviceMesh(dp=1, tp=-1), wide()
    samples = mesh["dp"] if way == "tensor" else world
    if way == "tensor":
        tp.parallelize_module(model, mesh["tp"], tp.plan_of(model))
    elif way == "context":
        context_parallel(model, world)
    model = fully_shard(model, world, way) if isinstance(way, int) else DistributedDataParallel(model, samples)
    optimizer = widths.optimizer(kind, model, lr, weight_decay=0.1)
    for step, batch in batches(*((0, 1) if way == "context" else (samples.rank, samples.size))):
        part = cut_sequence(batch, world) if way == "context" else batch
        training.train_step(model, optimizer, part, loss_sum, samples, seed=0, step=step, units=LENGTH)
    return pieces_together(model) if isinstance(way, int) else tp.full_state_dict(model)


def annotated(name):
    """The same of a model whose matrices annotations cut over all ranks."""
    (model, widths), (kind, lr) = wide(), OPTIMIZERS[name]
    annotate.shard_parameters(model, comm.DeviceMesh(tp=-1), annotate.megatron(model))
    optimizer = widths.optimizer(kind, model, lr, weight_decay=0.1)
    for _, batch in batches(0, 1):
        optimizer.zero_grad()
        (loss_sum(model, batch) / (batch.count * LENGTH)).backward()
        optimizer.step()
    return annotate.full_state_dict(model)


def exact(stage, name):
    """Digest of the parameters after some steps of exact mode."""
    world, (kind, lr), (model, widths) = comm.world(), OPTIMIZERS[name], wide()
    training.prepare_exact(world, 2)
    options = {"exact": True, "micro_shards": 2}
    model = fully_shard(model, world, stage, **options) if stage else DistributedDataParallel(model, world, **options)
    optimizer = widths.optimizer(kind, model, lr, weight_decay=0.1)
    for step, batch in batches(world.rank, world.size, 2):
        training.train_step(model, optimizer, batch, loss_sum, world, seed=0, step=step, units=LENGTH, micro_shards=2)
    state = pieces_together(model) if stage else model.state_dict()
    return {name: value.tobytes() for name, value in state.items()}


def pipelined(name, path, resume=False):
    """The same of a model of layers, cut into as many stages as there are ranks. Half way a checkpoint is saved at
    path, or read there."""
    world, (kind, lr) = comm.world(), OPTIMIZERS[name]
    model, widths = wide(layers)
    stage = cut_sequential(model, world.size, [1] * 4)[world.rank]
    pipeline = Pipeline([stage], world, one_forward_one_backward(world.size, 4))
    optimizer = widths.optimizer(kind, stage, lr, weight_decay=0.1)
    for step, batch in batches(0, 1):
        if step == 1:
            (checkpoints.load if resume else checkpoints.save)(path, [stage], optimizer, comm=world)
        elif resume and not step:
            continue
        optimizer.zero_grad()
        pipeline.run(batch, lambda y, labels: nn.cross_entropy(y, labels, reduction="sum"), seed=0, step=step,
                     units=LENGTH)
        optimizer.step()
    return stages_together([stage], world)
