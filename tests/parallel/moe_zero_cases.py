"""What the ranks do in the tests of divided experts in fully_shard. What must hold is checked by the parent process."""

from collections import Counter
from dataclasses import dataclass
from functools import partial

import numpy as np

from minitorch_dist import checkpoints, comm, data, ledger, nn, optim, training
from minitorch_dist import manual_seed as seed
from minitorch_dist.checkpoints.layout import layouts, named_arrays, piece_of
from minitorch_dist.compress.prune import sparsity
from minitorch_dist.parallel import (
    DistributedDataParallel,
    MixedPrecisionPolicy,
    full_optimizer_state_dict,
    full_state_dict,
    fully_shard,
    load_full_optimizer_state_dict,
)
from minitorch_dist.parallel.experts import moe
from minitorch_dist.parallel.tensor import tensor_parallel as tp

from .sharded_cases import digest, said

VOCABULARY, LENGTH, BATCH, DIM, EXPERTS, LAYERS = 13, 6, 8, 24, 4, 2


def gpt(dtype="f8", dim=DIM):
    """Of experts whose stacks the ranks cut within a matrix."""
    seed(5)
    return nn.GPT(VOCABULARY, LENGTH, layers=LAYERS, heads=2, dim=dim, dropout=0.1, dtype=np.dtype(dtype), moe={
        "experts": EXPERTS, "std": 0.3, "group": "sequence", "capacity_factor": 1.0, "z": 0.1})


def loss_sum(model, shard):
    logits, aux = model(shard.inputs)
    return nn.cross_entropy(logits, shard.labels, reduction="sum") + shard.labels.size * aux


def muon(params):
    """Of the experts' stacks and the blocks' matrices; AdamW of the rest."""
    params = list(params)
    hidden = [p for p in params if p.ndim > 2 or p.ndim == 2 and p is not params[0]]
    return optim.Combined(optim.Muon(hidden, lr=0.02), optim.AdamW([p for p in params if p.ndim < 2], lr=0.01),
                          optim.SGD([params[0]], lr=0.05))


OPTIMIZERS = {"adamw": partial(optim.AdamW, lr=0.01, weight_decay=0.1), "muon": muon,
              "adafactor": partial(optim.Adafactor, lr=0.05, eps=(1e-6, 1e-3))}


@dataclass(frozen=True)
class Way:
    """How a model is divided.

    ep, tp  ranks that divide the experts, and the matrices; dp gets the others
    stage   0: DistributedDataParallel
    axes    of the mesh, the slowest first; over: those of shard_over
    frozen  names of parameters
    """

    ep: int = 1
    stage: int = 3
    axes: tuple = ("dp", "ep")
    over: tuple = ()
    tp: int = 1
    optimizer: str = "adamw"
    accumulate: int = 1
    frozen: tuple = ()

    def mesh(self):
        return comm.DeviceMesh(**{axis: {"dp": -1, "ep": self.ep}[axis] for axis in self.axes}, tp=self.tp)


class Training:
    """A model in training."""

    def __init__(self, way, dtype="f8", dim=DIM, **options):
        self.way, self.mesh = way, way.mesh()
        self.on, module = self.mesh[way.axes], gpt(dtype, dim)
        for name, p in module.named_parameters():
            p.requires_grad_(name not in way.frozen)
        if way.tp > 1:
            tp.parallelize_module(module, self.mesh["tp"], tp.plan_of(module))
        if way.ep > 1:
            tp.parallelize_module(module, self.mesh["ep"], moe.plan_of(module))
        if way.over:
            options["shard_over"] = self.mesh[way.over]
        self.model = fully_shard(module, self.on, way.stage, **options) if way.stage else \
            DistributedDataParallel(module, self.on)
        self.optimizer = OPTIMIZERS[way.optimizer](p for p in self.model.parameters() if p.requires_grad)
        tokens = np.random.default_rng(8).integers(0, VOCABULARY, (40, LENGTH + 1))
        self.loader = data.Loader(tokens[:, :-1], tokens[:, 1:], BATCH, seed=2, rank=self.on.rank, size=self.on.size)
        self.step, self.losses, self.norms = 0, [], []

    def run(self, steps):
        def clip(model):
            self.norms.append(optim.clip_grad_norm_(model.parameters(), 0.8))
        for _ in range(steps):
            epoch, start = divmod(self.step, len(self.loader))
            self.losses.append(training.train_step(
                self.model, self.optimizer, next(iter(self.loader.epoch(epoch, start))), loss_sum, self.on, seed=3,
                step=self.step, units=LENGTH, clip=clip, accumulate=self.way.accumulate)[0])
            self.step += 1
        return self

    def pieces(self):
        """[(name, box, values)] of what this rank's module has."""
        def found(module):
            kinds = layouts(module)
            return [(name, box, np.array(piece_of(array, place)))
                    for name, array in named_arrays(module) for box, place in kinds[name].pieces]
        if not self.way.stage:
            return found(self.model)
        with self.model.gathered() as module:
            return found(module)


def curves(ways, steps):
    """[(losses, norms, this rank's pieces, rank 0's full state dict)]."""
    seen = []
    for way in ways:
        it = Training(way).run(steps)
        seen.append((it.losses, it.norms, it.pieces(), full_state_dict(it.model) if way.stage else None))
    return seen


# ---------------------------------------------------------------- counted

def counted(ways, dim):
    """By way: what a step of Adam in float32 sends: {("all" or "alike" or "ep", op): bytes}; holds: {kind: bytes}; has
    gathered most; and the units in the order in which they are reduced."""
    seen = []
    for way in ways:
        it = Training(way, "f4", dim).run(1)
        same = it.model.grid_of(it.model.module.blocks[0].mlp.experts.up).everyone.name
        names = {it.on.name: "all", same: "alike", "ep": "ep"}
        batch = next(iter(it.loader.epoch(0)))
        it.model.zero_grad()
        with ledger.record(memory=True) as book:
            loss_sum(it.model, batch.shards[0]).backward()
            it.optimizer.step()
        sent = Counter()
        for (name, op), n in book.bytes_sent.items():
            sent[names[name], op] += n
        order = [event[1] for event in book.events if event[0] == "post"]
        seen.append(({key: n for key, n in sent.items() if n}, dict(book.live), book.peak["buffer"], order))
    return seen


# ---------------------------------------------------------------- states

def one_after_another(ways, folder):
    """By way: (this rank's pieces, {name: weights that aren't 0}) after a step that goes on from the checkpoint of the
    way before."""
    world, seen = comm.world(), []
    for i, way in enumerate(ways):
        it = Training(way)
        it.step = i
        if i:
            checkpoints.load(f"{folder}/{i - 1}", it.model, it.optimizer, world)
        it.run(1)
        checkpoints.save(f"{folder}/{i}", it.model, it.optimizer, None, world)
        seen.append((it.pieces(), {name: kept for name, _, kept, _ in sparsity(it.model).rows}))
    return seen


def full_states(first, second):
    """(rank 0's full state dicts of model and optimizer, in a way, after two steps; after another way, which loads
    them, has made one more, its pieces; what it says of experts of the wrong shape)."""
    it = Training(first).run(2)
    state, optimizer = full_state_dict(it.model), full_optimizer_state_dict(it.model, it.optimizer)
    again = Training(second)
    name = "blocks.1.mlp.experts.up"
    wrong = said(lambda: again.model.load_state_dict(state | {name: state[name][1:]} if state else state))
    again.model.load_state_dict(state)
    load_full_optimizer_state_dict(again.model, again.optimizer, optimizer)
    again.step = 2
    return state, optimizer, again.run(1).pieces(), wrong


# ---------------------------------------------------------------- beside

def scaled():
    """[(whether inf was found, whether this rank's pieces have changed)] of an optimizer of experts alone: inf on the
    last rank only, then nowhere."""
    world, seen = comm.world(), []
    it = Training(Way(2))
    pieces = [p for name, p in it.model.named_parameters() if "experts" in name]
    optimizer, scaler = optim.SGD(pieces, lr=0.1), optim.GradScaler(init_scale=4.0)
    for bad in (True, False):
        optimizer.zero_grad()
        it.model.zero_grad()
        before = [p.numpy().copy() for p in pieces]
        scaler.scale(loss_sum(it.model, next(iter(it.loader.epoch(0))).shards[0])).backward()
        if bad and world.rank + 1 == world.size:
            pieces[-1].grad.data[..., -1] = np.inf
        scaler.step(optimizer)
        seen.append((scaler.found_inf(optimizer), any(not np.array_equal(p.numpy(), old)
                                                      for p, old in zip(pieces, before, strict=True))))
        scaler.update()
    return seen


class Half(nn.Module):
    """Two mixtures, of which one is used."""

    def __init__(self):
        super().__init__()
        seed(1)
        self.one, self.two = (nn.MoE(6, 10, EXPERTS, dtype=np.float64) for _ in range(2))

    def forward(self, x):
        y, aux = self.two(x)
        return y.sum() + aux


def unused():
    """{stage: (unused parameters, names of those with a gradient)}."""
    found = {}
    for stage in (1, 2, 3):
        mesh, module = Way(2).mesh(), Half()
        tp.parallelize_module(module, mesh["ep"], moe.plan_of(module))
        model = fully_shard(module, mesh["dp", "ep"], stage)
        model(np.random.default_rng(comm.world().rank).standard_normal((5, 6))).backward()
        found[stage] = model.unused_parameters, [name for name, p in model.named_parameters() if p.grad is not None]
    return found


def mixed():
    """{stage: (losses, digest of this rank's pieces, dtypes of the experts' values)} in 16 bits; stage None: in
    float32."""
    found, policy = {}, MixedPrecisionPolicy("bfloat16", "bfloat16", "float32")
    for stage in (None, 1, 3):
        options = {} if stage is None else {"mp_policy": policy}
        it = Training(Way(2, stage or 3), "f4", **options).run(2)
        with it.model.gathered() as module:
            dtype = str(module.blocks[0].mlp.experts.up.dtype)
        found[stage] = it.losses, digest({name: array for name, _, array in it.pieces()}), dtype
    return found


def refused():
    """{what: the error}."""
    world, mesh, found = comm.world(), Way(2).mesh(), {}
    crossed = world.split((0, 1, 1, 0)[world.rank], name="crossed")
    turned = world.split(world.rank // 2, key=-world.rank, name="turned")

    def divided(over=mesh["ep"]):
        module = gpt()
        return tp.parallelize_module(module, over, moe.plan_of(module))
    attempts = {"exact": lambda: fully_shard(divided(comm.DeviceMesh(ep=2, dp=2)["ep"]), world, exact=True),
                "nobody": lambda: divided()(np.zeros((2, 6), int)),
                "some": lambda: fully_shard(divided(), mesh["dp"]),
                "crossed": lambda: fully_shard(divided(crossed), world),
                "turned": lambda: fully_shard(divided(turned), world),
                "copies": lambda: fully_shard(divided(crossed), world, shard_over=mesh["ep"]),
                "already": lambda: tp.parallelize_module(fully_shard(divided(), world), mesh["ep"],
                                                         {"blocks.*.mlp": "experts"})}
    for what, action in attempts.items():
        found[what] = said(action)
    return found
