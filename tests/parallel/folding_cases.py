"""What the ranks do in the tests of mixtures whose experts are divided over ranks that share sequences, too. What must
hold is checked by the parent process."""

import contextlib
from unittest import mock

import numpy as np

import minitorch_dist as mt
from minitorch_dist import checkpoints, comm, data, ledger, nn, optim, training
from minitorch_dist.parallel import DistributedDataParallel, fully_shard, positions
from minitorch_dist.parallel.check import check_grads_across
from minitorch_dist.parallel.context.context import context_parallel, cut_sequence
from minitorch_dist.parallel.experts import expert_bias
from minitorch_dist.parallel.experts import moe as ep
from minitorch_dist.parallel.same_bits import check_same_bits
from minitorch_dist.parallel.tensor import mixtures
from minitorch_dist.parallel.tensor import tensor_parallel as tp

VOCABULARY, LENGTH, BATCH, STEPS, EXPERTS, DIM = 13, 12, 8, 5, 12, 12
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


def batches(mesh):
    """This rank's part of each."""
    samples, tokens = mesh["dp", "ep"], np.random.default_rng(8).integers(0, VOCABULARY, (40, LENGTH + 1))
    loader = data.Loader(tokens[:, :-1], tokens[:, 1:], BATCH, seed=2, rank=samples.rank, size=samples.size)
    every = (batch for epoch in range(STEPS) for batch in loader.epoch(epoch))
    return every if mesh["cp"].size == 1 else (cut_sequence(batch, mesh["cp"]) for batch in every)


def train(setting, sizes=(), stage=0, optimizer="AdamW", how=(), goes_on=None, saves=None):
    """(losses, gradient norms, whole parameters, loads of the last step) after STEPS steps on the mesh of these sizes;
    {} for one process. how: cut's arguments; goes_on, saves: checkpoints that it begins with, and writes."""
    mesh = comm.DeviceMesh(**{"dp": -1, "cp": 1, "ep": 1, "tp": 1} | dict(sizes))
    world, model = mesh["dp", "cp", "ep"], gpt(setting)
    if mesh.axes["tp"] > 1:
        cut(model, mesh, **dict(how))
    elif how:
        tp.parallelize_module(model, mesh[dict(how)["over"]], ep.plan_of(model))
    if mesh.axes["cp"] > 1:
        context_parallel(model, mesh["cp"])
    replica = fully_shard(model, world, stage=stage) if stage else DistributedDataParallel(
        model, world, bucket_cap_mb=0.002, first_bucket_mb=0.001)
    made = OPTIMIZERS[optimizer](list(replica.parameters()))
    if goes_on:
        checkpoints.load(goes_on, replica, made, mesh.world)
    losses, norms, loads = [], [], {}

    def clip(model):
        norms.append(optim.clip_grad_norm_(model.parameters(), 0.5))
        return norms[-1]
    for step, batch in zip(range(STEPS), batches(mesh), strict=False):
        losses.append(training.train_step(replica, made, batch, loss_sum, world, seed=3, step=step, units=LENGTH,
                                          clip=clip)[0])
        loads = expert_bias.update(replica, speed=0.01)
    if not stage and mesh.world.size > 1:
        check_same_bits(replica, everyone=mesh.world)
    if saves:
        checkpoints.save(saves, replica, made, {}, mesh.world)
    return losses, norms, tp.full_state_dict(replica), {path: load.tolist() for path, load in loads.items()}


# ---------------------------------------------------------------- what must not be

WRONG = {
    "cotangents of means not summed": lambda: mock.patch.object(
        positions, "copy_to", lambda x, comm: x),
    "means of the rank's own positions": lambda: mock.patch.object(positions.Positions, "mean", lambda self, x: x),
    "the router's gradients not summed": lambda: mock.patch.object(
        mixtures, "summed", lambda *_, **__: contextlib.nullcontext()),
    "experts' gradients summed once more": lambda: mock.patch.object(
        mixtures, "summed", lambda module, comm, but, of=mixtures.summed: of(module, comm)),
}


def train_wrong(setting, sizes, which):
    """{what is wrong: what train gives}; which: the numbers of some of WRONG."""
    found = {}
    for name, wrong in [list(WRONG.items())[i] for i in which]:
        with wrong(), mock.patch(f"{__name__}.check_same_bits"):      # which would tell as well
            found[name] = train(setting, sizes)
    return found


# ---------------------------------------------------------------- one layer

def layer(mesh, size=4, **options):
    """A mixture for parts of sequences, and this rank's part (2, 3, size) of its input."""
    mt.manual_seed(1)
    whole = nn.MoE(size, 10, 12, k=3, capacity_factor=None, group="sequence", dtype=np.float64, std=0.5, **options)
    model = nn.Sequential(whole)
    tp.parallelize_module(model, mesh["tp"], {"0": "whole sequences"}, sequence_parallel=True)
    tp.parallelize_module(model, mesh["ep", "tp"], {"0": "experts"})
    whole.experts.summed = True
    samples = np.random.default_rng([7, mesh["ep"].rank]).standard_normal((2, 3 * mesh["tp"].size, size))
    return model[0], np.split(samples, mesh["tp"].size, 1)[mesh["tp"].rank]


def counted(sizes):
    """Of a layer without an auxiliary loss ({pass: {(axis, op): (calls, bytes)}}, rows for the experts of each rank, of
    every rank)."""
    mesh = comm.DeviceMesh(**sizes)
    model, x = layer(mesh, balance=0)
    x = mt.tensor(x, requires_grad=True)
    with ledger.record() as forward:
        y, aux = model(x)
    with ledger.record() as backward:
        mt.sum(y * np.arange(4)).backward()
    chosen = model.moe.routing(x)[1].load.reshape(mesh.world.size, -1).sum(1)
    return {name: {key: (book.calls[key], book.bytes_sent[key]) for key in book.calls}
            for name, book in (("forward", forward), ("backward", backward))}, \
        comm.world().all_gather_object(chosen.tolist())


def gradients(sizes, order):
    """Whether answers, and the auxiliary loss, have the derivatives of finite differences over all ranks."""
    mesh = comm.DeviceMesh(**sizes)
    model, x = layer(mesh, balance=2.0, z=0.3, sequence_balance=0.7, shared=1)
    for module in model.modules():
        for name, p in list(module._parameters.items()):
            module._parameters[name] = None if p is None else p.numpy()     # bare constants
            object.__setattr__(module, name, module._parameters[name])
    world = mesh["ep", "tp"]
    check_grads_across(lambda x: mt.sin(model(x)[0]), x, world, order=order)
    if mesh.axes["ep"] == 1:        # elsewhere each group of tp has a loss of its own
        check_grads_across(lambda x: model(x)[1], x, world, one_output=True, order=order)
    return True


# ---------------------------------------------------------------- what doesn't go together

def refusals():
    """{what was tried: (error, its text)}, on 4 ranks."""
    mesh, found = comm.DeviceMesh(ep=2, tp=2), {}

    def attempt(what, make, options=(), setting="balanced"):
        try:
            make(gpt(setting, **dict(options)))
        except Exception as error:
            found[what] = type(error).__name__, str(error)
    four, halves = comm.DeviceMesh(ep=1, tp=4), mesh["ep"]
    attempt("a capacity", lambda model: cut(model, mesh), {"capacity_factor": 2.0})
    attempt("a capacity, experts first", lambda model: cut(model, mesh, first="experts"), {"capacity_factor": 2.0})
    attempt("groups of tokens", lambda model: cut(model, mesh), {"group": 3})
    attempt("a part of the ranks", lambda model: (
        tp.parallelize_module(model, halves, ep.plan_of(model)),
        tp.parallelize_module(model, four["tp"], tp.plan_of(model), True)))
    attempt("exact", lambda model: DistributedDataParallel(cut(model, mesh), mesh["ep"], exact=True))
    attempt("whole sequences", lambda model: DistributedDataParallel(
        cut(model, mesh, sequence_parallel=False), mesh["ep"]))
    attempt("too few", lambda model: DistributedDataParallel(cut(model, mesh), comm.world().split(comm.world().rank)))
    attempt("nobody sums", lambda model: cut(model, mesh)(np.zeros((2, LENGTH), int)))
    model = cut(gpt("balanced"), mesh).eval()
    whole = gpt("balanced").eval()
    tokens = np.random.default_rng(3).integers(0, VOCABULARY, (2, LENGTH))
    found["evaluation"] = abs(model(tokens)[0].numpy() - whole(tokens)[0].numpy()).max()
    return found
