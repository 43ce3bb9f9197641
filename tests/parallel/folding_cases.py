"""What the ranks do in the tests of mixtures whose experts are divided over ranks that share sequences, too. What must
hold is checked by the parent process."""

import contextlib

import numpy as np

import minitorch_dist as mt
from minitorch_dist import checkpoints, comm, data, nn, optim, training
from minitorch_dist.parallel import DistributedDataParallel, fully_shard
from minitorch_dist.parallel.experts import expert_bias
from minitorch_dist.parallel.experts import moe as ep
from minitorch_dist.parallel.same_bits import check_same_bits
from minitorch_dist.parallel.tensor import tensor_parallel as tp

VOCABULARY, LENGTH, BATCH, STEPS, EXPERTS, DIM = 13, 6, 8, 5, 12, 12
SETTINGS = {        # MoE's arguments
    "balanced": {"balance": 0.3, "z": 0.1, "group": "sequence"},
    "as DeepSeek-V3": {"balance": 0, "shared": 1, "mlp": "swiglu", "score": "sigmoid", "route_scale": 2.5, "k": 3,
                       "expert_bias": True, "sequence_balance": 0.3, "nodes": (4, 2)},
    "of all of a call": {"balance": 0.3, "k": 1},
}
OPTIMIZERS = {"AdamW": lambda params: optim.AdamW(params, lr=0.01, weight_decay=0.1),
              "Muon": lambda params: optim.Combined(
                  optim.Muon([p for p in params if p.ndim == 3], lr=0.01),
                  optim.AdamW([p for p in params if p.ndim != 3], lr=0.01)),
              "Adafactor": lambda params: optim.Adafactor(params, lr=0.01)}


def gpt(setting, **options):
    mt.manual_seed(5)
    mixture = {"experts": EXPERTS, "std": 0.3, "capacity_factor": None} | SETTINGS[setting] | options
    return nn.GPT(VOCABULARY, LENGTH, layers=2, heads=6, dim=DIM, dropout=0.2, dtype=np.float64, moe=mixture)


def cut(model, mesh, over=("ep", "tp"), first="positions", sequence_parallel=True, overlap=False):
    """The model with experts over the axes `over`, its matrices and sequences over tp. first: what is cut first."""
    steps = {
        "positions": lambda: tp.parallelize_module(model, mesh["tp"], tp.plan_of(model), sequence_parallel, overlap),
        "experts": lambda: tp.parallelize_module(model, mesh[over], ep.plan_of(model))}
    for name in (first, *(steps.keys() - {first})):
        steps[name]()
    return model


def loss_sum(model, shard):
    logits, aux = model(shard.inputs)
    return nn.cross_entropy(logits, shard.labels, reduction="sum") + shard.labels.size * aux


def batches(world):
    tokens = np.random.default_rng(8).integers(0, VOCABULARY, (40, LENGTH + 1))
    loader = data.Loader(tokens[:, :-1], tokens[:, 1:], BATCH, seed=2, rank=world.rank, size=world.size)
    return (batch for epoch in range(STEPS) for batch in loader.epoch(epoch))


def train(setting, sizes=(), stage=0, optimizer="AdamW", spoil=None, folder=None, **how):
    """(losses, gradient norms, whole parameters, loads of the last step) after STEPS steps on the mesh of these sizes;
    {} for one process. folder: a checkpoint is saved there at the end."""
    mesh = comm.DeviceMesh(**{"dp": -1, "ep": 1, "tp": 1} | dict(sizes))
    world, model = mesh["dp", "ep"], gpt(setting)
    if mesh.axes["tp"] > 1:
        cut(model, mesh, **how)
    replica = fully_shard(model, world, stage=stage) if stage else DistributedDataParallel(
        model, world, bucket_cap_mb=0.002, first_bucket_mb=0.001)
    with spoil(replica, mesh) if spoil else contextlib.nullcontext():
        made = OPTIMIZERS[optimizer](list(replica.parameters()))
        losses, norms, loads = [], [], {}

        def clip(model):
            norms.append(optim.clip_grad_norm_(model.parameters(), 0.5))
            return norms[-1]
        for step, batch in zip(range(STEPS), batches(world), strict=False):
            losses.append(training.train_step(replica, made, batch, loss_sum, world, seed=3, step=step, units=LENGTH,
                                              clip=clip)[0])
            loads = expert_bias.update(replica, speed=0.01)
    if not stage and mesh.world.size > 1:
        check_same_bits(replica, everyone=mesh.world)
    if folder:
        checkpoints.save(folder, replica, made, comm=mesh.world)
    return losses, norms, tp.full_state_dict(replica), {path: load.tolist() for path, load in loads.items()}
