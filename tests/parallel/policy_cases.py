"""What the ranks do in the tests of fully_shard's mixed precision. What must hold is checked by the parent process."""

import hashlib
from contextlib import nullcontext

import numpy as np

import minitorch_dist as mt
from minitorch_dist import backend, comm, data, ledger, nn, optim, training
from minitorch_dist.autodiff.checkpointing import checkpoint
from minitorch_dist.parallel import (
    DistributedDataParallel,
    MixedPrecisionPolicy,
    full_optimizer_state_dict,
    full_state_dict,
    fully_shard,
    load_full_optimizer_state_dict,
)
from minitorch_dist.parallel.tensor import parallelize_module

from . import plain

BATCH, STEPS, LR = 12, 3, 0.3
POLICIES = {"values": MixedPrecisionPolicy("bfloat16"), "both": MixedPrecisionPolicy("bfloat16", "bfloat16"),
            "float16": MixedPrecisionPolicy("float16", "float16", "float32"),
            "gradients": MixedPrecisionPolicy(reduce_dtype="bfloat16"), "nothing": MixedPrecisionPolicy()}


def mlp(dtype="f4"):
    """Units of unequal sizes, none of which the ranks can share equally."""
    mt.manual_seed(5)
    return nn.Sequential(nn.Linear(plain.FEATURES, 90, dtype=dtype), nn.Tanh(), nn.Linear(90, 101, dtype=dtype),
                         nn.ReLU(), nn.Linear(101, plain.CLASSES, dtype=dtype))


def gpt():
    mt.manual_seed(6)
    return nn.GPT(17, 6, layers=2, heads=4, dim=36)


def batches(rank, size, exact=False):
    x, labels = plain.dataset()
    loader = data.Loader(x.astype("f4"), labels, BATCH, seed=2, rank=rank, size=size, micro_shards=8 if exact else 1)
    return zip(range(STEPS), (b for epoch in range(9) for b in loader.epoch(epoch)), strict=False)


def loss_of(model, shard):
    return nn.cross_entropy(model(shard.inputs), shard.labels, reduction="sum")


def by_hand(policy, ranks):
    """[state dict after each step] of SGD on float32 values, with what the ranks do made one after the other: a model
    of 16 bits per rank and step, whose gradients are rounded, then added up in float32."""
    values_in, sent_in = (backend.as_dtype(name or "float32") for name in (policy.param_dtype, policy.reduce_dtype))
    masters, states = {name: p.numpy().copy() for name, p in mlp().named_parameters()}, []
    for shards in zip(*(batches(rank, ranks) for rank in range(ranks)), strict=True):
        total = {name: np.zeros_like(value) for name, value in masters.items()}
        for _, batch in shards:
            model = mlp(values_in)
            model.load_state_dict({name: value.astype(values_in) for name, value in masters.items()})
            for shard in batch.shards:
                y = model(shard.inputs.astype(values_in))
                (nn.cross_entropy(y, shard.labels, reduction="sum") / batch.count).backward()
            for name, p in model.named_parameters():
                total[name] += p.grad.numpy().astype(sent_in).astype("f4")
        for name in masters:
            masters[name] = masters[name] - np.float32(LR) * total[name]
        states.append(masters.copy())
    return states


def curves(ways):
    """{(policy, stage): [state dict after each step]}, on rank 0."""
    world, found = comm.world(), {}
    for name, stage in ways:
        model = fully_shard(mlp(), world, stage, mp_policy=POLICIES[name])
        optimizer, states = optim.SGD(model.parameters(), lr=LR), []
        for step, batch in batches(world.rank, world.size):
            training.train_step(model, optimizer, batch, loss_of, world, seed=1, step=step)
            states.append(full_state_dict(model))
        found[name, stage] = states
    return found


def exact_digests():
    """{way: digest} of parameters after AdamW under autocast in exact mode; "ddp" has no policy."""
    world, found = comm.world(), {}
    rows = world.split(world.rank // 2, name="row")
    for way, stage, shards in (("ddp", 0, None), ("1", 1, None), ("3", 3, None), ("copies, 1", 1, rows),
                               ("copies, 3", 3, rows)):
        model = DistributedDataParallel(mlp(), world, exact=True) if way == "ddp" else \
            fully_shard(mlp(), world, stage, exact=True, mp_policy=POLICIES["values"], shard_over=shards)
        optimizer = optim.AdamW(model.parameters(), lr=0.01)
        for step, batch in batches(world.rank, world.size, exact=True):
            training.train_step(model, optimizer, batch, loss_of, world, seed=1, step=step, amp="bfloat16")
        state = model.module.state_dict() if way == "ddp" else full_state_dict(model)
        found[way] = hashlib.sha256(b"".join(v.tobytes() for v in state.values())).hexdigest()
    return found


def counted(policy, stage):
    """The ledger of the second step with Adam, and the units' sizes."""
    world = comm.world()
    model = fully_shard(gpt(), world, stage, mp_policy=POLICIES[policy])
    optimizer = optim.Adam(model.parameters())
    tokens = np.random.default_rng(world.rank).integers(0, 17, (3, 7))
    for _ in range(2):
        with ledger.record(memory=True) as book:
            nn.cross_entropy(model(tokens[:, :-1]).reshape((-1, 17)), tokens[:, 1:].reshape(-1)).backward()
            optimizer.step()
        model.zero_grad()
    return {"sizes": [unit.size for unit in model.units], "sent": {op: n for (_, op), n in book.bytes_sent.items()},
            "live": dict(book.live), "peak": dict(book.peak)}


def seen_inside(stage):
    """What the module sees, what it gives, and what pieces and gradients are."""
    world = comm.world()
    model, dtypes = fully_shard(mlp(), world, stage, mp_policy=POLICIES["float16"]), {}

    def look(module, inputs):
        dtypes["inputs"], dtypes["weight"] = str(inputs[0].dtype), str(module.weight.dtype)
    model.module[2].register_forward_pre_hook(look)
    y = model(np.ones((2, plain.FEATURES), np.float32))
    dtypes["output"] = str(y.dtype)
    mt.sum(y).backward()
    dtypes["pieces"] = {str(p.dtype) for p in model.parameters()} | {str(p.grad.dtype) for p in model.parameters()}
    return dtypes


def scaled(stage):
    """Factors, and whether pieces moved, in float16 with a factor that is too large for it at first: gradients overflow
    on the last rank alone."""
    world = comm.world()
    model = fully_shard(mlp(), world, stage, mp_policy=POLICIES["float16"])
    optimizer, scaler = optim.SGD(model.parameters(), lr=LR), optim.GradScaler(2.0 ** 8)
    x, labels = plain.dataset()
    x, seen = x[:4].astype("f4"), []
    for step in range(3):
        before = [p.numpy().copy() for p in model.parameters()]
        weight = 1e4 if step == 1 and world.rank == world.size - 1 else 1.0
        scaler.scale(nn.cross_entropy(model(x), labels[:4]) * weight).backward()
        scaler.step(optimizer)
        scaler.update()
        model.zero_grad()
        moved = any(not np.array_equal(p.numpy(), old) for p, old in zip(model.parameters(), before, strict=True))
        seen.append((scaler.get_scale(), world.all_gather_object(moved)))
    return seen


def accumulated(stage):
    """Gradients of one backward of three parts ("values": summed in float32), of three with no_sync, summed, and of one
    from checkpoints: {way: [a unit's shard]}."""
    world, found = comm.world(), {}
    x, labels = plain.dataset()
    parts = [(x[i:i + 3].astype("f4"), labels[i:i + 3]) for i in 3 * world.rank + np.array([0, 20, 40])]

    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()

        def forward(self, x):
            return checkpoint(self.inner)(x)
    for way in ("one", "values", "no_sync", "checkpoint"):
        policy = POLICIES["values" if way == "values" else "both"]
        model = fully_shard(Again() if way == "checkpoint" else mlp(), world, stage, mp_policy=policy)
        losses = [nn.cross_entropy(model(x), labels, reduction="sum") for x, labels in parts if way != "no_sync"]
        if losses:
            (losses[0] + losses[1] + losses[2]).backward()
        for i, (x, labels) in enumerate(parts if way == "no_sync" else ()):
            with model.no_sync() if i < 2 else nullcontext():
                nn.cross_entropy(model(x), labels, reduction="sum").backward()
        found[way] = [unit.flat.grads.copy() for unit in model.units]
    return found


def loaded(stage):
    """Whether values and optimizer state come back by load_state_dict, after a forward without gradients; and what a
    load inside gathered(), and an optimizer that is none, give: on all ranks alike."""
    world, errors = comm.world(), []
    model = fully_shard(mlp(), world, stage, mp_policy=POLICIES["values"])
    optimizer, x = optim.SGD(model.parameters(), lr=LR, momentum=0.9), np.ones((2, plain.FEATURES), np.float32)
    saved, state = full_state_dict(model), full_optimizer_state_dict(model, optimizer)
    with mt.no_grad():
        before = model(x).numpy().copy()
        mt.sum(model(x))
    model.load_state_dict({name: 2 * value for name, value in saved.items()})
    with mt.no_grad():
        moved = not np.array_equal(model(x).numpy(), before)
    for what in (dict(saved, extra=np.ones(2)), saved):
        try:
            model.load_state_dict(what)
        except KeyError:
            errors.append("KeyError")
    with mt.no_grad():
        back = np.array_equal(model(x).numpy(), before)
    wide = dict(state, state=[{name: a.astype(np.float64) for name, a in arrays.items()}
                              for arrays in state.get("state", ())])
    for action in (lambda: load_full_optimizer_state_dict(model, optimizer, {} if world.rank == 0 else state),
                   lambda: load_full_optimizer_state_dict(model, Stranger(optimizer), state),
                   lambda: load_full_optimizer_state_dict(model, optimizer, wide)):
        try:
            action()
        except ValueError as error:
            errors.append(str(error))
    try:
        with model.gathered():
            model.load_state_dict(saved)
    except RuntimeError as error:
        errors.append(str(error))
    return moved, back, errors


class Stranger:
    """Has an optimizer's state, and no way to compare it."""

    def __init__(self, optimizer):
        self.param_groups, self.state_dict = optimizer.param_groups, optimizer.state_dict


class Normed(nn.Module):
    """BatchNorm over ranks, in 16 bits."""

    def __init__(self):
        super().__init__()
        mt.manual_seed(9)
        self.first, self.norm, self.last = nn.Linear(plain.FEATURES, 24), nn.BatchNorm(24), nn.Linear(24, plain.CLASSES)

    def forward(self, x):
        return self.last(mt.relu(self.norm(self.first(x))))


def sums_of_16_bits(kind):
    """{name: gradient}, whole, of a model in which ranks add up numbers of 16 bits inside."""
    world = comm.world()
    x, labels = plain.dataset()
    mine = slice(8 * world.rank // world.size, 8 * (world.rank + 1) // world.size) if kind == "norm" else slice(0, 8)
    if kind == "norm":
        model = fully_shard(Normed(), world, 2, mp_policy=POLICIES["values"])
    else:
        mesh = comm.DeviceMesh(dp=1, tp=-1)
        model = parallelize_module(mlp(), mesh["tp"], {"0": "column", "2": "row"})
        model = fully_shard(model, mesh["dp"], 3, mp_policy=POLICIES["values"])
    nn.cross_entropy(model(x[mine].astype("f4")).astype("float32"), labels[mine], reduction="sum").backward()
    return {name: p.grad.numpy().copy() for name, p in model.named_parameters()}


def on_a_gpu():
    """{policy: (how far parameters of a training on the stand-in for a GPU are from one on the host, where)}."""
    from tests.device.fake_cupy import installed
    world, found = comm.world(), {}
    with installed():
        for stage, policy in ((1, "float16"), (3, "float16"), (2, "gradients")):
            states = []
            for device in ("cpu", "cuda"):
                model = fully_shard(mlp().to(device), world, stage, mp_policy=POLICIES[policy])
                optimizer = optim.SGD(model.parameters(), lr=LR)
                for step, batch in batches(world.rank, world.size):
                    training.train_step(model, optimizer, batch, loss_of, world, seed=1, step=step)
                states.append(full_state_dict(model))
            apart = max((abs(states[0][key] - states[1][key]).max() for key in states[0]), default=0.0)
            found[policy, stage] = apart, {p.device[:4] for p in model.parameters()}
    return found


def refused():
    """{what: error}."""
    world, errors = comm.world(), {}

    def attempt(what, make):
        try:
            make()
            errors[what] = "nothing"
        except (ValueError, TypeError) as error:
            errors[what] = f"{type(error).__name__}: {error}"
    attempt("unknown", lambda: MixedPrecisionPolicy("float8"))
    attempt("wide", lambda: MixedPrecisionPolicy(reduce_dtype="float64"))
    attempt("whole numbers", lambda: MixedPrecisionPolicy(output_dtype="int32"))
    attempt("exact", lambda: fully_shard(mlp(), world, exact=True, mp_policy=POLICIES["both"]))
    attempt("float64", lambda: fully_shard(mlp("f8"), world, mp_policy=POLICIES["values"]))
    fully_shard(mlp("f8"), world, mp_policy=None)
    attempt("ranks differ", lambda: fully_shard(
        mlp(), world, mp_policy=POLICIES["values" if world.rank == 0 else "both"]))
    return errors
