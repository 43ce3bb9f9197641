"""What the ranks do in the tests of fully_shard. What must hold is checked by the parent process."""

import copy
import hashlib
from contextlib import nullcontext

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, data, ledger, nn, optim, training
from minitorch_dist.flat import flat_buffers
from minitorch_dist.optim.clip import block_sums, tables
from minitorch_dist.parallel import (
    DistributedDataParallel,
    full_optimizer_state_dict,
    full_state_dict,
    fully_shard,
    load_full_optimizer_state_dict,
)

from . import plain

SEED, TIME, VOCABULARY = 3, 6, 17


# ---------------------------------------------------------------- models and data

def mlp(dtype):
    """Units of unequal sizes, none of which the ranks can share equally."""
    mt.manual_seed(5)
    return nn.Sequential(nn.Linear(plain.FEATURES, 90, dtype=dtype), nn.Tanh(), nn.Dropout(0.2),
                         nn.Linear(90, 101, dtype=dtype), nn.ReLU(), nn.Linear(101, plain.CLASSES, dtype=dtype))


def gpt(dtype):
    """Tied: the embedding is the head, too. A block has 12 parameters, whose blocks of 4,096 lie across the ranks'."""
    mt.manual_seed(6)
    return nn.GPT(VOCABULARY, TIME, layers=2, heads=4, dim=36, dropout=0.1, dtype=dtype)


class Odd(nn.Module):
    """A parameter that two units share, a unit called twice, one inside of another, frozen and unused parameters."""

    def __init__(self, dtype):
        super().__init__()
        mt.manual_seed(7)
        self.first = nn.Linear(plain.FEATURES, 30, dtype=dtype)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(30, 30, dtype=dtype), nn.Tanh()) for _ in range(3)))
        self.blocks[2][0].weight = self.blocks[0][0].weight
        self.outer = nn.Sequential(nn.LayerNorm(30, dtype=dtype), nn.Linear(30, 30, dtype=dtype))
        self.scale = nn.Parameter(np.full((), 1.5, dtype))
        self.unused = nn.Linear(30, 5, dtype=dtype)
        self.norm = nn.BatchNorm(30, dtype=dtype)
        self.last = nn.Linear(30, plain.CLASSES, dtype=dtype)
        self.first.bias.requires_grad_(False)

    def units(self):
        return [*self.blocks, self.outer, self.outer[1], self.unused]

    def forward(self, x):
        x = self.blocks(mt.tanh(self.first(x)))
        x = self.blocks[1](self.outer(x) * self.scale)
        return self.last(self.norm(x))


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


MODELS = {"mlp": mlp, "gpt": gpt, "odd": Odd}
OPTIMIZERS = {
    "sgd": lambda m: optim.SGD(trained(m), lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda m: optim.Adam(trained(m), lr=0.01),
    "adamw": lambda m: optim.AdamW([{"params": [p for p in trained(m) if p.ndim > 1], "weight_decay": 0.1},
                                    {"params": [p for p in trained(m) if p.ndim < 2], "weight_decay": 0.0}], lr=0.01),
}


def muon(model):
    """Of all matrices, the embedding too; AdamW of the rest."""
    return optim.Combined(optim.Muon([p for p in trained(model) if p.ndim == 2], lr=0.02),
                          optim.AdamW([p for p in trained(model) if p.ndim != 2], lr=0.01))


OPTIMIZERS["muon"] = muon


def dataset(model, dtype):
    if model != "gpt":
        x, labels = plain.dataset()
        return x.astype(dtype), labels
    tokens = np.random.default_rng(8).integers(0, VOCABULARY, (plain.SAMPLES, TIME + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model, shard):
    logits = model(shard.inputs)
    return nn.cross_entropy(logits.reshape((-1, logits.shape[-1])), shard.labels.reshape(-1), reduction="sum")


class Training:
    """A model in training: a wrapper, or none, on a Communicator."""

    def __init__(self, model, optimizer, wrap, on, dtype="f8", exact=False, batch=12):
        self.dtype = np.dtype(dtype)
        self.kind, self.on, self.exact = model, on, exact
        self.model = wrap(MODELS[model](self.dtype))
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        x, labels = dataset(model, self.dtype)
        self.loader = data.Loader(x, labels, batch, seed=2, rank=on.rank, size=on.size, micro_shards=8 if exact else 1)
        self.step, self.losses, self.norms, self.digests = 0, [], [], []
        self.batches = (b for epoch in range(99) for b in self.loader.epoch(epoch))

    def run(self, steps, clip=None, accumulate=1, watch=lambda: None):
        def clipped(model):
            self.norms.append(optim.clip_grad_norm_(model.parameters(), clip))
        for _ in range(steps):
            self.losses.append(training.train_step(
                self.model, self.optimizer, next(self.batches), loss_of, self.on, seed=SEED, step=self.step,
                units=TIME if self.kind == "gpt" else 1, clip=clipped if clip else None, accumulate=accumulate)[0])
            self.step += 1
            watch()
        return self


class Alone(nn.Module):
    """A module in the place of a wrapper."""

    exact = False

    def __init__(self, module):
        super().__init__()
        self.add_module("", module)

    def forward(self, x):
        return self._modules[""](x)

    def no_sync(self):
        return nullcontext()


def one_process(model, optimizer, steps, clip=None, batch=12):
    """(losses, norms, state dict) by a process that knows nothing of ranks, in float64."""
    it = Training(model, optimizer, Alone, comm.world_of_one(), batch=batch)
    it.run(steps, clip)
    return it.losses, it.norms, it.model.state_dict()


# ---------------------------------------------------------------- single passes

def said(act):
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def batch(rank, step=0):
    random = np.random.default_rng([31, rank, step])
    return mt.tensor(random.standard_normal((3, plain.FEATURES))), random.standard_normal((3, plain.CLASSES))


def backward(model, step=0):
    x, ct = batch(comm.world().rank, step)
    (model(x) * ct).sum().backward()


def net():
    """Of each unit two ranks have a part."""
    mt.manual_seed(9)
    return nn.Sequential(nn.Linear(plain.FEATURES, 1200, dtype="f8"), nn.Tanh(),
                         nn.Linear(1200, plain.CLASSES, dtype="f8"))


def grads(model):
    """{name: whole gradient} on rank 0."""
    return {name: g for unit in model.units for name, g in unit.collect(unit.flat.grads).items()}


# ---------------------------------------------------------------- one curve

CURVES = {      # name: (model, optimizer, clip, accumulate, batch)
    "mlp": ("mlp", "adam", None, 1, 12),
    "mlp, clipped, accumulated": ("mlp", "sgd", 0.3, 3, 13),
    "gpt, decay, clipped": ("gpt", "adamw", 0.5, 1, 7),
    "gpt, accumulated": ("gpt", "adam", None, 2, 13),
    "odd": ("odd", "adamw", 0.3, 1, 12),
    "gpt, muon, clipped": ("gpt", "muon", 0.5, 1, 13),
}
STEPS = 4
SOME_WAYS = {3: ("2", "3, kept"), 4: ("1", "3")}     # by ranks; the others do all
WAYS = {"1": (1, {}), "2": (2, {}), "3": (3, {}), "3, kept": (3, {"reshard_after_forward": False})}


def sharded(way, on, **options):
    stage, more = WAYS[way]

    def wrap(module):
        units = {"units": module.units()} if isinstance(module, Odd) else {}
        return fully_shard(module, on, stage, **more, **units, **options)
    return wrap


def curves():
    """{(name, way): (losses, norms, state dict, names with ndim)} on all ranks; the state dicts on rank 0."""
    world, seen = comm.world(), {}
    for name, (model, optimizer, clip, accumulate, batch) in CURVES.items():
        for way in SOME_WAYS.get(world.size, WAYS):
            it = Training(model, optimizer, sharded(way, world), world, batch=batch).run(STEPS, clip, accumulate)
            names = {name: p.ndim for name, p in it.model.named_parameters()}
            seen[name, way] = it.losses, it.norms, full_state_dict(it.model), names, it.model.unused_parameters
    return seen


# ---------------------------------------------------------------- exact mode

EXACT = {       # name: (model, optimizer, clip)
    "mlp, clipped": ("mlp", "adam", 0.3),
    "gpt, clipped": ("gpt", "adamw", 0.2),
    "odd": ("odd", "adam", 0.3),
    "gpt, muon": ("gpt", "muon", None),
}
EXACT_STEPS = 3


def digest(state):
    return hashlib.sha256(b"".join(state[name].tobytes() for name in sorted(state))).hexdigest()


def exact_curves(ways):
    """{(name, way): (losses, norms, digest after each step)}; way "ddp" is DistributedDataParallel."""
    from threadpoolctl import threadpool_limits
    threadpool_limits(1)
    world, seen = comm.world(), {}
    for name, (model, optimizer, clip) in EXACT.items():
        for way in ways:
            wrap = sharded(way, world, exact=True) if way != "ddp" else \
                (lambda module: DistributedDataParallel(module, world, exact=True, bucket_cap_mb=0.05))
            it = Training(model, optimizer, wrap, world, "f4", True, batch=18)

            def watch(it=it, way=way):
                state = it.model.state_dict() if way == "ddp" else full_state_dict(it.model)
                it.digests.append(digest(state) if state else None)
            it.run(EXACT_STEPS, clip, watch=watch)
            seen[name, way] = it.losses, it.norms, it.digests
    return seen


class Several(nn.Module):
    """One unit of parameters that begin and end inside of blocks; d loss / d p is what it is given for p."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(np.zeros(size, "f4")) for size in (5000, 9000, 7000))

    def forward(self, *gradients):
        return sum((p * g).sum() for p, g in zip((self.a, self.b, self.c), gradients, strict=True))


def sums_of_given():
    """Norms, and sums of squares per block, of gradients that rank 0 has, and the others 0; and how many blocks of each
    parameter ranks share."""
    world, random, found = comm.world(), np.random.default_rng(8), []
    model = fully_shard(Several(), world)
    pieces = list(model.parameters())
    for _ in range(10):
        model.zero_grad()
        gradients = [random.standard_normal(size).astype("f4") for size in (5000, 9000, 7000)]
        model(*(g * np.float32(world.rank == 0) for g in gradients)).backward()
        norm = optim.clip_grad_norm_(pieces, 1e9)
        sums = block_sums(tables(flat_buffers(pieces), {*map(id, pieces)}))
        found.append((norm, [sums[id(p)].tolist() for p in pieces]))
    return found, [len(unit.piece(piece)[2]) for unit in model.units for piece in unit.pieces]


def across_blocks():
    """How many blocks of 4,096 elements of one parameter lie on several ranks."""
    model = fully_shard(gpt(np.dtype("f4")), comm.world())
    return sum(cut % 4096 > 0 for unit in model.units for piece in unit.pieces for cut in unit.piece(piece)[2])


def exact_shares():
    """reduce_scatter's exact bits beside those of all_reduce, in and out of the window, posted and not; and whether a
    sum in another order would have others."""
    world, seen = comm.world(), {}
    values = (np.random.default_rng(world.rank).standard_normal(world.size * 5000) * 10.0 ** world.rank).astype("f4")
    whole = values.copy()
    world.all_reduce(whole, exact=True)
    mine = whole.reshape(world.size, -1)[world.rank]
    for place in ("window", "plain"):
        for posted in (False, True):
            x = world.empty(values.shape, values.dtype) if place == "window" else np.empty_like(values)
            x[...] = values
            out = np.empty(5000, "f4")
            with ledger.record() as book:
                work = world.reduce_scatter(out, x, exact=True, async_op=posted)
                if posted:
                    work.wait()
            seen[place, posted] = out.tobytes() == mine.tobytes(), sum(book.bytes_sent.values())
    everyone = np.empty((world.size, values.size), "f4")
    world.all_gather(everyone, values)
    in_order = everyone[0].copy()
    for row in everyone[1:]:
        in_order += row
    seen["order matters"] = in_order.tobytes() != whole.tobytes()
    return seen


def on_three_ranks():
    """What exact mode says there."""
    world = comm.world()
    return [said(lambda: fully_shard(net(), world, exact=True)),
            said(lambda: world.reduce_scatter(np.zeros(2), np.zeros(6), exact=True))]


def on_a_gpu():
    """{(stage, exact): whether a training on the stand-in for a GPU has the bits of one on the host}."""
    from tests.device.fake_cupy import installed
    world, found = comm.world(), {}
    with installed():
        for kind, stage, exact in (("mlp", 1, False), ("mlp", 2, True), ("gpt", 3, False)):
            results = []
            for device in ("cpu", "cuda"):
                def wrap(module, device=device, stage=stage, exact=exact):
                    model = fully_shard(module.to(device), world, stage, exact=exact)
                    next(module.parameters()).register_post_accumulate_grad_hook(
                        lambda t: setattr(t, "grad", t.grad * 2))
                    return model
                it = Training(kind, "adamw", wrap, world, "f4", exact, batch=16).run(1, clip=0.2)
                where = {p.device[:4] for p in it.model.parameters()}
                state = full_optimizer_state_dict(it.model, it.optimizer)
                load_full_optimizer_state_dict(it.model, it.optimizer, state)
                it.model.load_state_dict(full_state_dict(it.model))
                it.run(1)
                whole = full_state_dict(it.model)
                results.append((it.losses, it.norms, whole and digest(whole)))
            found[stage, exact] = results[0] == results[1] and where == {"cuda"}
    return found


# ---------------------------------------------------------------- counted

def counted(model, way):
    """A step's traffic, memory and events of a float32 model with Adam, after one that isn't counted."""
    world = comm.world()
    it = Training(model, "adam", sharded(way, world), world, "f4").run(1)
    with ledger.record(memory=True) as book:
        it.run(1)
    units = [(unit.name, unit.size, sum(s.tensor.size for s in unit.segments)) for unit in it.model.units]
    it.model.zero_grad()
    return {"calls": {op: n for (_, op), n in book.calls.items()}, "units": units, "live": dict(book.live),
            "sent": {op: n for (_, op), n in book.bytes_sent.items()}, "peak": dict(book.peak),
            "events": [e for e in book.events if e[0] in ("gather", "free", "post")]}


# ---------------------------------------------------------------- states

def states(way, other):
    """Three steps, the states of all, three more; and what a model in another way makes of those states: the final
    state dicts on rank 0, the optimizer's steps, and whether an optimizer without ranks takes them and goes on alike.
    """
    world = comm.world()
    it = Training("odd", "adamw", sharded(way, world), world).run(3)
    model, optimizer = full_state_dict(it.model), full_optimizer_state_dict(it.model, it.optimizer)
    assert (world.rank == 0) == bool(model) == bool(optimizer)
    kept = copy.deepcopy((model, optimizer))
    it.run(3)

    def goes_on(again, load):
        again.run(2)    # other values, and another number of steps, than those that are loaded
        with mt.no_grad():
            again.model(batch(world.rank)[0])       # in stages 1 and 2 they have been gathered
        load(again)
        again.step, again.batches = 3, (b for epoch in range(99) for b in again.loader.epoch(epoch))
        for _ in range(3):
            next(again.batches)
        again.run(3)
        return again

    def load(again):
        again.model.load_state_dict(kept[0])
        load_full_optimizer_state_dict(again.model, again.optimizer, kept[1])
    second = goes_on(Training("odd", "adamw", sharded(other, world), world), load)
    found = {"first": full_state_dict(it.model), "second": full_state_dict(second.model)}
    if world.rank == 0:
        def load_alone(again):
            again.model.load_state_dict(kept[0])
            again.optimizer.load_state_dict(kept[1])
        alone = comm.world_of_one()
        found["alone"] = goes_on(Training("odd", "adamw", Alone, alone), load_alone).model.state_dict()
    return found
