"""What the ranks do in the tests of mixed precision. What must hold is checked by the parent process."""

from contextlib import nullcontext
from functools import partial

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, data, divergence, ledger, nn, optim, training
from minitorch_dist.parallel import DistributedDataParallel, full_state_dict, fully_shard
from minitorch_dist.parallel.experts import moe as ep
from minitorch_dist.parallel.pipelines import Pipeline, cut_sequential
from minitorch_dist.parallel.pipelines.schedules import one_forward_one_backward, placement_of, schedule_of
from minitorch_dist.parallel.tensor import tensor_parallel as tp

from . import plain
from .hook_cases import HOOKS

VOCABULARY, LENGTH, BATCH, SEED = 13, 6, 16, 3


def mlp(dtype=np.float32):
    mt.manual_seed(5)
    return nn.Sequential(nn.Linear(plain.FEATURES, 90, dtype=dtype), nn.Tanh(), nn.Linear(90, 101, dtype=dtype),
                         nn.ReLU(), nn.Dropout(0.2), nn.Linear(101, 70, dtype=dtype), nn.ReLU(),
                         nn.Linear(70, plain.CLASSES, dtype=dtype))


def gpt(moe=None):
    mt.manual_seed(6)
    return nn.GPT(VOCABULARY, LENGTH, layers=2, heads=4, dim=16, moe=moe)


def images(world, exact=False):
    x, labels = plain.dataset()
    return data.Loader(x.astype(np.float32), labels, BATCH, seed=2, rank=world.rank, size=world.size, drop_last=True,
                       micro_shards=8 if exact else 1)


def text(world):
    tokens = np.random.default_rng(8).integers(0, VOCABULARY, (64, LENGTH + 1))
    return data.Loader(tokens[:, :-1], tokens[:, 1:], BATCH, seed=2, rank=world.rank, size=world.size)


def loss_sum(model, shard):
    y = model(shard.inputs)
    y, aux = y if isinstance(y, tuple) else (y, 0.0)
    return nn.cross_entropy(y, shard.labels, reduction="sum") + shard.labels.size * aux


def batches(loader, steps):
    every = (batch for epoch in range(steps) for batch in loader.epoch(epoch))
    return zip(range(steps), every, strict=False)


def copies(model):
    return [p.numpy().copy() for p in model.parameters()]


# ---------------------------------------------------------------- curves

WAYS = {"ddp": DistributedDataParallel} | {
    f"stage {stage}": partial(fully_shard, stage=stage) for stage in (1, 2, 3)}


STEPS = 5
# amp, whether there is a scaler, clip
MIXED = (("float16", True, None), ("float16", True, 0.5), ("bfloat16", False, 0.5))
SETTINGS = (*MIXED, ("bfloat16", False, None), ("bfloat16", True, 0.5), (None, True, 0.5), (None, False, 0.5))


def exact_curve(way, amp, scaled, clip=None):
    """(losses, whole parameters, factors) in exact mode, of a factor that is too large at first."""
    world = comm.world()
    model = WAYS[way](mlp(), world, exact=True)
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    scaler = optim.GradScaler(2.0 ** 22 if amp == "float16" else 2.0 ** 16, growth_interval=3) if scaled else None
    losses, factors = [], []
    for step, batch in batches(images(world, exact=True), STEPS):
        losses.append(training.train_step(model, optimizer, batch, loss_sum, world, seed=SEED, step=step, amp=amp,
                                          scaler=scaler, clip=clip)[0])
        factors.append(scaler.get_scale() if scaled else None)
    whole = full_state_dict(model) if way != "ddp" else model.state_dict()
    return losses, {name: np.array(value) for name, value in whole.items()}, factors


def exact_curves(ways, settings):
    """{(way, amp, scaled, clip): exact_curve}"""
    return {(way, *setting): exact_curve(way, *setting) for way in ways for setting in settings}


def pipelined(name, pp, amp):
    """(losses, whole parameters, factors) of a pipeline in exact mode and mixed precision, in float16 with a scaler."""
    mesh = comm.DeviceMesh(dp=-1, pp=pp)
    schedule = schedule_of(name, pp, 8 // mesh["dp"].size)
    placement = placement_of(schedule)
    parts = cut_sequential(mlp(), sum(map(len, placement)))
    stages = [DistributedDataParallel(parts[i], mesh["dp"], exact=True) for i in placement[mesh.coords["pp"]]]
    optimizer = optim.AdamW([p for stage in stages for p in stage.parameters()], lr=0.01)
    scaler = optim.GradScaler(2.0 ** 22, growth_interval=3, comm=comm.world(), enabled=amp == "float16")
    pipeline, losses, factors = Pipeline(stages, mesh["pp"], schedule), [], []
    for step, batch in batches(images(mesh["dp"], exact=True), STEPS):
        optimizer.zero_grad()
        with mt.autocast(amp), divergence.quiet():
            losses.append(pipeline.run(batch, lambda y, labels: nn.cross_entropy(y, labels, reduction="sum"), seed=SEED,
                                       step=step, over=mesh["dp"], scaler=scaler))
        scaler.step(optimizer)
        scaler.update()
        factors.append(scaler.get_scale() if scaler.enabled else None)
    parts = comm.world().all_gather_object({name: np.array(value) for stage in stages
                                            for name, value in stage.state_dict().items()})
    return losses, {name: value for part in parts for name, value in part.items()}, factors


def pipelined_in_both_precisions():
    """Losses of one Pipeline in float32, in mixed precision, in float32 again."""
    world, found = comm.world(), []
    stage = DistributedDataParallel(cut_sequential(mlp().eval(), 2)[world.rank], world.split(world.rank))
    pipeline = Pipeline([stage.eval()], world, one_forward_one_backward(2, 4))
    inputs, labels = plain.dataset()
    (_, batch), = batches(data.Loader(inputs[:BATCH].astype(np.float32), labels[:BATCH], BATCH), 1)
    for amp in (False, True, False):
        stage.zero_grad()
        with mt.autocast("float16", enabled=amp):
            found.append(pipeline.run(batch, lambda y, labels: nn.cross_entropy(y, labels, reduction="sum"), seed=SEED,
                                      step=0))
    return found


def compressed(hook, scale, growth_interval, bad=()):
    """(losses, steps that were left out, parameters) of a hook that compresses, with a factor of `scale` (None: without
    a scaler); in steps `bad` a sample of rank 1 is NaN."""
    world, losses, left_out = comm.world(), [], []
    scaler = optim.GradScaler(scale or 1.0, growth_interval=growth_interval, enabled=scale is not None)
    model = DistributedDataParallel(mlp().eval(), world)
    model.register_comm_hook(HOOKS[hook](scaler))
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    for step, batch in batches(images(world), 10):
        inputs = batch.inputs.copy()
        if step in bad and world.rank == 1:
            inputs[0, 0] = np.nan
        optimizer.zero_grad()
        with divergence.quiet():
            loss = nn.cross_entropy(model(inputs), batch.labels, reduction="sum") / batch.count
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        left_out += [step] * scaler.found_inf(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses, left_out, copies(model)


EXPERTS = {"experts": 4, "group": "sequence", "capacity_factor": 2.0}


def cut_gradients(kind, amp):
    """{name: whole gradient} of one batch of a GPT in mixed precision, cut over the ranks: "whole", "tensor",
    "sequence", "experts", "whole experts"."""
    world = comm.world()
    model = gpt(EXPERTS if "experts" in kind else None)
    over = world.split(world.rank) if kind in ("tensor", "sequence") or world.size == 1 else world
    if kind in ("tensor", "sequence"):
        tp.parallelize_module(model, world, tp.plan_of(model), kind == "sequence")
    elif kind == "experts":
        tp.parallelize_module(model, world, ep.plan_of(model))
    replica = DistributedDataParallel(model, over)
    batch = next(iter(text(over).epoch(0)))
    with ledger.record() as book, mt.autocast(amp):
        for shard in batch.shards:
            (loss_sum(replica, shard) * (1024 / (batch.count * LENGTH))).backward()
    for p in model.parameters():       # the way in which whole values are collected takes gradients as well
        p.data[...] = p.grad.data / 1024
    return tp.full_state_dict(model), dict(book.calls), dict(book.bytes_sent)


# ---------------------------------------------------------------- inf on one rank

def spoil(model, name):
    """NaN in the last element of a gradient that this rank has of the parameter; whether it has one."""
    grads = [p.grad.data for path, p in model.named_parameters() if name in path and p.grad is not None and p.size]
    for g in grads[:1]:
        g.reshape(-1)[-1:] = np.nan if g.flags.c_contiguous else 0
    return bool(grads)


CUTS = {        # name -> which parameter has NaN, on the last rank alone
    "ddp": None, "stage 1": "2.weight", "stage 2": "2.weight", "stage 3": "2.weight", "tensor": "attention.qkv.weight",
    "tensor, some told": "attention.qkv.weight", "pipeline": "weight", "experts": "experts.up",
}


def one_rank_has_nan(cut):
    """[(whether this rank's parameters changed, factor)] of three steps of SGD and Adam; in the second one the last
    rank alone has NaN."""
    world, found = comm.world(), []
    for make in (lambda params: optim.SGD(params, lr=0.1), lambda params: optim.Adam(params, lr=0.01)):
        ranks, pipeline = world, None
        if cut in WAYS:
            model, loader = WAYS[cut](mlp(), world), images(world)
        elif cut == "pipeline":
            stage = cut_sequential(mlp(), world.size)[world.rank]
            ranks = world.split(world.rank)
            model, loader = DistributedDataParallel(stage, ranks), images(ranks)
            pipeline = Pipeline([model], world, one_forward_one_backward(world.size, 4))
        else:
            model = gpt(EXPERTS if cut == "experts" else None)
            tp.parallelize_module(model, world, (ep if cut == "experts" else tp).plan_of(model))
            ranks = world if cut == "experts" else world.split(world.rank)
            model, loader = DistributedDataParallel(model, ranks), text(ranks)
        optimizer = make(model.parameters())
        scaler = optim.GradScaler(256.0, comm={"pipeline": world, "tensor, some told": ranks}.get(cut))
        seen = []
        for step, batch in batches(loader, 3):
            optimizer.zero_grad()
            here = step == 1 and world.rank == world.size - 1
            with mt.autocast("float16"):
                if pipeline:
                    pipeline.run(batch, lambda y, labels: nn.cross_entropy(y, labels, reduction="sum"), seed=SEED,
                                 step=step, scaler=scaler)
                else:
                    for shard in batch.shards:
                        with mt.backend.random_scope(SEED, step, batch.count, shard.rows, 8), \
                                divergence.quiet() if here else nullcontext():
                            loss = loss_sum(model, shard) * ((np.inf if here and cut == "ddp" else 1) / batch.count)
                            scaler.scale(loss).backward()
            if here and CUTS[cut]:
                assert spoil(model, CUTS[cut])
            before = copies(model)
            scaler.step(optimizer)
            scaler.update()
            changed = {not np.array_equal(a, b) for a, b in zip(before, copies(model), strict=True) if a.size}
            seen.append((any(changed), scaler.get_scale()))
        found.append(seen)
    return found


def overflowing_sums():
    """{(kind, exact): whether the step was left out} of eight rows; their gradients, times the factor, are 8,192 each,
    or four times 32,768 and four times -32,768."""
    world, found = comm.world(), {}
    for kind, rows in (("alike", [1.0] * 8), ("opposite", [4.0] * 4 + [-4.0] * 4)):
        for exact in (False, True):
            model = DistributedDataParallel(nn.Linear(1, 1, bias=False), world, exact=exact)
            scaler, optimizer = optim.GradScaler(2.0 ** 13), optim.SGD(model.parameters(), lr=0.1)
            loader = data.Loader(np.array(rows, np.float32)[:, None], np.zeros(8), 8, rank=world.rank, size=world.size,
                                 shuffle=False, micro_shards=8 if exact else 1)
            with divergence.quiet():
                for shard in next(loader.epoch(0)).shards:
                    with mt.autocast("float16"):
                        scaler.scale(mt.sum(model(shard.inputs))).backward()
                scaler.step(optimizer)
            found[kind, exact] = scaler.found_inf(optimizer)
    return found


# ---------------------------------------------------------------- memory

def gathered():
    """{enabled: the most bytes of gathered values at a time}, in stage 3."""
    world, peaks = comm.world(), {}
    for enabled in (False, True):
        mt.manual_seed(1)
        model = fully_shard(nn.Sequential(*(nn.Linear(96, 96) for _ in range(6))), world)
        x = np.random.default_rng(1).standard_normal((4, 96)).astype(np.float32)
        with ledger.record(memory=True) as book, mt.autocast("float16", enabled):
            mt.sum(model(x)).backward()
        peaks[enabled] = book.peak["buffer"]
    return peaks


# ---------------------------------------------------------------- collectives

def moved():
    """({collective: what it gives of bfloat16}, what a sum raises)."""
    world = comm.world()
    x = (np.arange(4) + 10 * world.rank + 0.5).astype(mt.bfloat16)
    found = {"all_gather": np.empty(4 * world.size, x.dtype), "all_to_all": np.empty_like(x), "broadcast": x.copy(),
             "send": np.empty_like(x), "window": world.empty(8, x.dtype)}
    world.all_gather(found["all_gather"], x)
    world.all_to_all(found["all_to_all"], x)
    world.broadcast(found["broadcast"], 1)
    work = world.isend(x, 1 - world.rank)
    world.recv(found["send"], 1 - world.rank)
    work.wait()
    found["window"][4 * world.rank:4 * world.rank + 4] = x
    world.all_gather(found["window"], found["window"][4 * world.rank:4 * world.rank + 4])
    try:
        world.all_reduce(x)
    except TypeError as error:
        return found, str(error)


def columns(amp):
    """(x's gradient, the whole model's) of two layers cut by columns: the second one's copy_to is given 16 bits."""
    world, found = comm.world(), []
    for cut in (True, False):
        mt.manual_seed(1)
        layers = [nn.Linear(6, 8), nn.Linear(8, 4)]
        if cut:
            layers = [tp.ColumnParallelLinear(layer, world, gather_output=True) for layer in layers]
        x = mt.tensor(np.random.default_rng(2).standard_normal((3, 6)).astype(np.float32), requires_grad=True)
        with mt.autocast(amp):
            y = layers[1](mt.tanh(layers[0](x)))
            mt.sum(y * np.random.default_rng(3).standard_normal((3, 4)).astype(np.float32)).backward()
        found.append(x.grad.numpy().copy())
    return found


# ---------------------------------------------------------------- what stage 3 keeps

class Products(nn.Module):
    """Weights by themselves, transposed, in einsum, in a convolution, twice, and inside a checkpoint."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(2, 5, 3)
        self.wide, self.square = nn.Linear(20, 48), nn.Linear(48, 48, bias=False)
        self.table = nn.Parameter(np.random.default_rng(2).standard_normal((48, 7)).astype("f4"))

    def forward(self, x):
        h = mt.tanh(self.square(mt.tanh(self.wide(self.conv(x).reshape((len(x), 20))))))
        h = h + mt.einsum("bi,ji->bj", h, self.square.weight)
        return h @ self.table + mt.checkpoint(lambda v: mt.einsum("bi,ij->bj", v, self.table))(h)


def kept_in_16_bits(amp, steps=2):
    """{whether the model is cut: ({name: gradient}, bytes of activations and of gathered values after forward, the
    number of its weights)}."""
    world, found = comm.world(), {}
    for cut in (False, True):
        mt.manual_seed(7)
        model = Products()
        size = sum(p.size for p in model.parameters())
        model = fully_shard(model, world, units=[model.wide]) if cut else model
        for step in range(steps):       # what the second time finds at its addresses was written before
            x = np.random.default_rng(step).standard_normal((3, 2, 6)).astype("f4")
            model.zero_grad()
            with ledger.record(memory=True) as book:
                with mt.autocast(amp):
                    y = model(x)
                kept = book.live["activation"], book.live["buffer"], size
                y.astype(np.float32).sum().backward()
        grads = {name: g / world.size for unit in model.units for name, g in unit.collect(unit.flat.grads).items()} \
            if cut else {name: p.grad.numpy() for name, p in model.named_parameters()}
        found[cut] = grads, *kept
    return found


def stage_without_parts():
    """(whether an inf was found, the scale after it) where the pipeline's comm was given, of whose stages the second is
    cut, and one rank's part has the inf; what the first has is the same on the ranks that share the second."""
    mesh = comm.DeviceMesh(pp=2, tp=2)
    stage = nn.Sequential(nn.Linear(3, 4))
    if mesh.coords["pp"]:
        tp.parallelize_module(stage, mesh["tp"], {"0": "column"})
    optimizer, scaler = optim.SGD(stage.parameters(), lr=0.1), optim.GradScaler(2.0, comm=mesh["pp"])
    stage(mt.tensor(np.ones((2, 3), np.float32))).sum().backward()
    if comm.world().rank == 3:
        next(stage.parameters()).grad.data[0, 0] = np.inf
    scaler.unscale_(optimizer)
    found = scaler.found_inf(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return found, scaler.get_scale()
