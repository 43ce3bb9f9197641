"""What the ranks do in the tests of frozen parameters that are cut. What must hold is checked by the parent process."""

import hashlib
import weakref

import numpy as np

import minitorch_dist as mt
from minitorch_dist import checkpoints, comm, data, ledger, nn, optim
from minitorch_dist.autodiff.saved import owner_of
from minitorch_dist.backend import as_dtype
from minitorch_dist.compress import lora
from minitorch_dist.nn.absent import Absent
from minitorch_dist.parallel import (
    DistributedDataParallel,
    MixedPrecisionPolicy,
    full_optimizer_state_dict,
    full_state_dict,
    fully_shard,
    load_full_optimizer_state_dict,
)
from minitorch_dist.parallel.pipelines import Pipeline, cut_sequential
from minitorch_dist.parallel.pipelines import full_state_dict as whole_of_stages
from minitorch_dist.parallel.pipelines.schedules import one_forward_one_backward
from minitorch_dist.parallel.tensor import tensor_parallel as tp
from tests.compress.lora_cases import moved

from .sharded_cases import MODELS, Alone, Training, said

STEPS, EXACT_STEPS = 3, 2
KINDS = {       # name: (targets of adapters, quantize)
    "LoRA": (None, None), "QLoRA": (None, "nf4"),
    "first block": (["blocks.0.*.qkv", "blocks.0.mlp.?"], None), "last block": (["blocks.1.mlp.2"], "nf4"),
}
WAYS = {"1": (1, {}), "3": (3, {}), "3, kept": (3, {"reshard_after_forward": False})}


def adapted(kind, module, rank=3):
    targets, quantize = KINDS[kind]
    return moved(lora.add(module, rank, 5, targets=targets, quantize=quantize, double=kind != "last block"))


def spoilt(module, rank):
    """The module, with values on all ranks but the first that the first's must take the place of."""
    for p in module.parameters() if rank else ():
        p.data[...] = 1
    return module


def sharded(kind, way, on, **options):
    stage, more = WAYS[way]
    return lambda module: fully_shard(spoilt(adapted(kind, module), on.rank), on, stage, **more, **options)


def start(kind, wrap, on, dtype="f8", exact=False):
    return Training("gpt", "adamw", wrap, on, dtype, exact, batch=18 if exact else 7)


# ---------------------------------------------------------------- one curve

def alone(kind):
    """(losses, norms, state dict) of one process."""
    it = start(kind, lambda module: Alone(adapted(kind, module)), comm.world_of_one()).run(STEPS, 0.3)
    return it.losses, it.norms, it.model.state_dict()


def curves(jobs):
    """[(losses, norms, state dict)] of (kind, way); every second step is one of two micro-batches."""
    world, seen = comm.world(), []
    for kind, way in jobs:
        it = start(kind, sharded(kind, way, world), world).run(1, 0.3)
        it.run(STEPS - 1, 0.3, accumulate=2)
        seen.append((it.losses, it.norms, full_state_dict(it.model)))
    return seen


def hybrid():
    """The same of copies over pairs of ranks."""
    mesh = comm.DeviceMesh(replicate=2, shard=2)
    both = mesh["replicate", "shard"]
    it = start("QLoRA", sharded("QLoRA", "3", both, shard_over=mesh["shard"]), both).run(STEPS, 0.3)
    return it.losses, it.norms, full_state_dict(it.model)


def exact_curves(kinds, ways):
    """{(kind, way): (losses, norms, digest of the state)} in exact mode; way "ddp": DistributedDataParallel."""
    world, seen = comm.world(), {}
    for kind in kinds:
        for way in ways:
            wrap = sharded(kind, way, world, exact=True) if way != "ddp" else \
                (lambda module, kind=kind: DistributedDataParallel(adapted(kind, module), world, exact=True))
            it = start(kind, wrap, world, "f4", True).run(EXACT_STEPS, 0.3)
            state = it.model.state_dict() if way == "ddp" else full_state_dict(it.model)
            digest = hashlib.sha256(b"".join(state[name].tobytes() for name in sorted(state))).hexdigest()
            seen[kind, way] = it.losses, it.norms, state and digest
    return seen


# ---------------------------------------------------------------- counted

def wide(quantize, dim=76, targets=None):
    mt.manual_seed(6)
    return lora.add(nn.GPT(17, 6, layers=3, heads=4, dim=dim), 5, 4, targets=targets, quantize=quantize)


def batch(rank, step=0):
    random = np.random.default_rng([step, rank])
    return random.integers(0, 17, (3, 6)), random.integers(0, 17, 18)


def one_pass(model, rank, step=0):
    x, labels = batch(rank, step)
    nn.cross_entropy(model(x).reshape((18, -1)), labels, reduction="sum").backward()


def calling(blocks, k):
    """A forward of blocks by a checkpoint of each k of them."""
    def forward(x):
        for i in range(0, len(blocks), k):
            def run(x, some=tuple(blocks)[i:i + k]):
                for block in some:
                    x = block(x)
                return x
            x = mt.checkpoint(run)(x)
        return x
    return forward


CHECKPOINTS = {"none": None, "inside": (), "saving": ("linear", "attention"), "around": 1, "around two": 2}


def checkpointed(module, how):
    """A GPT, whose blocks run as checkpoints that save such ops, or are called by checkpoints of so many of them."""
    if isinstance(which := CHECKPOINTS[how], int):
        module.blocks.forward = calling(module.blocks, which)
    for block in module.blocks if isinstance(which, tuple) else ():
        block.forward = mt.checkpoint(block.forward, save=which)
    return module


def counted(quantize, way, targets=None, how="none", micro_batches=1, copies=1):
    """A step's traffic and memory, after one that isn't counted."""
    module = checkpointed(wide(quantize, 120, targets), how)
    mesh = comm.DeviceMesh(replicate=copies, shard=comm.world().size // copies)
    world = mesh["replicate", "shard"]
    before = [weakref.ref(p.data) for p in module.parameters()]
    stage, more = WAYS[way]
    model = fully_shard(module, world, stage, shard_over=mesh["shard"], **more)
    gone = sum(array() is None for array in before), len(before)
    optimizer = optim.Adam(lora.parameters(model), 0.01)
    for step in range(2):
        with ledger.record(memory=True) as book:
            model.zero_grad()
            for _ in range(micro_batches - 1):
                with model.no_sync():
                    one_pass(model, world.rank, step)
            one_pass(model, world.rank, step)
            optimizer.step()
    held = {id(owner): owner.nbytes for owner in (owner_of(p.data) for p in model.parameters())}
    return {"sent": {op: n for (_, op), n in book.bytes_sent.items()}, "live": dict(book.live), "peak": dict(book.peak),
            "calls": {op: n for (_, op), n in book.calls.items()}, "gone": gone, "held": sum(held.values()),
            "absent": all(isinstance(p.data, Absent) for p in module.parameters()),
            "alive": [unit.name for unit in model.units if unit.whole is not None],
            "gathered": [name for kind, name in book.events if kind == "gather"],
            "bits": hashlib.sha256(b"".join(p.data.tobytes() for p in model.parameters())).hexdigest()}


def counted_checkpoints(ways, quantize, targets, copies):
    """{how blocks are checkpointed: counted} of two micro-batches."""
    return {how: counted(quantize, "3", targets, how, 2, copies) for how in ways}


# ---------------------------------------------------------------- states

def other_values(state):
    """A state dict with other values, the frozen ones too."""
    return {name: (a[::-1] if a.dtype.kind == "u" else a * 1.5 + 0.25).astype(a.dtype) for name, a in state.items()}


def states():
    """{way: (state dict of a fresh model, that after loading another, and what the module has in gathered())}."""
    world, found = comm.world(), {}
    for way in ("1", "3"):
        it = start("QLoRA", sharded("QLoRA", way, world), world)
        with mt.no_grad():
            it.model(batch(world.rank)[0])
        first = full_state_dict(it.model)
        it.model.load_state_dict(other_values(first))
        with it.model.gathered() as module:
            inside = module.state_dict()
        found[way] = first, full_state_dict(it.model), inside
    return found


def wrapped(form, on):
    wrap = (lambda module: DistributedDataParallel(spoilt(adapted("QLoRA", module), on.rank), on)) if form == "ddp" \
        else sharded("QLoRA", form, on)
    return start("QLoRA", wrap, on)


def save(folder, form):
    """Two steps; then a checkpoint, and another step. The state, on rank 0."""
    world = comm.world()
    it = wrapped(form, world).run(2)
    checkpoints.save(folder, it.model, it.optimizer, {}, world)
    it.run(1)
    return it.model.state_dict() if form == "ddp" else full_state_dict(it.model)


def load(folder, form):
    """That other step of somebody else. The state, on rank 0."""
    world = comm.world()
    it = wrapped(form, world)
    checkpoints.load(folder, it.model, it.optimizer, world)
    for _ in range(2):
        next(it.batches)
    it.step = 2
    it.run(1)
    return it.model.state_dict() if form == "ddp" else full_state_dict(it.model)


def optimizer_states():
    """Whether what the optimizer has is of the adapters alone, and whether it can be loaded."""
    world = comm.world()
    it = start("LoRA", sharded("LoRA", "3", world), world).run(2)
    saved = full_optimizer_state_dict(it.model, it.optimizer)
    load_full_optimizer_state_dict(it.model, it.optimizer, saved)
    return [{name: a.shape for name, a in state.items()} for state in saved["state"]] if saved else None


# ---------------------------------------------------------------- other forms of parallelism

def with_tensor_parallelism():
    """(losses, state) of a model whose matrices are cut, and whose parts, frozen and trained, are cut again."""
    mesh = comm.DeviceMesh(dp=2, tp=2)

    def wrap(module):
        module = tp.parallelize_module(module, mesh["tp"], tp.plan_of(module))
        module = lora.add(module, 3, 5)
        return fully_shard(module, mesh["dp"], 3)
    it = start("LoRA", wrap, mesh["dp"])
    tp.load_full_state_dict(it.model, adapted("LoRA", MODELS["gpt"](np.dtype("f8"))).state_dict())
    it.run(STEPS, 0.3)
    return it.losses, tp.full_state_dict(it.model)


def layers():
    mt.manual_seed(4)
    module = nn.Sequential(nn.Linear(5, 70, dtype="f8"), nn.Tanh(), nn.Linear(70, 13, dtype="f8"), nn.Tanh(),
                           nn.Linear(13, 90, dtype="f8"), nn.Tanh(), nn.Linear(90, 4, dtype="f8"))
    return moved(lora.add(module, 3, 5, targets=["2", "6"], quantize="nf4"))


def with_pipeline(size):
    """State after some steps of a pipeline of two stages, each of which is cut over `size` ranks; without: of one
    process."""
    x, labels = np.random.default_rng(8).standard_normal((STEPS, 24, 5)), np.arange(STEPS * 24).reshape(STEPS, -1) % 4
    if not size:
        model = layers()
        optimizer = optim.SGD(lora.parameters(model), 0.5, momentum=0.9)
        for step in range(STEPS):
            optimizer.zero_grad()
            nn.cross_entropy(model(x[step]), labels[step]).backward()
            optimizer.step()
        return model.state_dict()
    mesh = comm.DeviceMesh(pp=2, dp=size)
    part = fully_shard(cut_sequential(layers(), 2, [1] * 7)[mesh.coords["pp"]], mesh["dp"], 3)
    optimizer = optim.SGD(lora.parameters(part), 0.5, momentum=0.9)
    pipeline = Pipeline([part], mesh["pp"], one_forward_one_backward(2, 4))
    loader = data.Loader(x.reshape(-1, 5), labels.reshape(-1), 24, shuffle=False, rank=mesh["dp"].rank, size=size)
    for batch in loader.epoch(0):
        part.zero_grad()
        pipeline.run(batch, lambda output, labels: nn.cross_entropy(output, labels, reduction="sum"), seed=3, step=0)
        optimizer.step()
    return whole_of_stages([part], mesh["pp"])


# ---------------------------------------------------------------- other dtypes, and what is refused

DTYPES = ("f8", "f4", "f2", "bfloat16", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?", "c16")


class Tables(nn.Module):
    """A frozen table, and a number, of each dtype, all of which make one number."""

    def __init__(self):
        super().__init__()
        random = np.random.default_rng(3)
        for code in DTYPES:
            for name, shape in (("table", (5, 7)), ("number", ()), ("nothing", (0, 3))):
                values = np.asarray(random.integers(0, 2 if code == "?" else 100, shape)).astype(as_dtype(code))
                self._register(self._parameters, f"{name}_{values.dtype.name}", mt.Tensor(values))
        self.weight = nn.Parameter(np.ones(3))

    def forward(self, x):
        found = sum(float(np.real(p.data).astype("f8").sum()) for p in self._parameters.values() if not p.requires_grad)
        return (self.weight * x).sum() * found


def tables():
    """(outputs of it whole, and cut; whether the values are the same bits)."""
    world, whole = comm.world(), Tables()
    model = fully_shard(spoilt(Tables(), world.rank), world)
    state = full_state_dict(model)
    same = all(state[name].tobytes() == p.data.tobytes() and state[name].dtype == p.dtype
               for name, p in whole.named_parameters()) if state else None
    return float(whole(np.arange(3.0)).data), float(model(np.arange(3.0)).data), same


def policies():
    """{stage: outputs and gradients' norms under a MixedPrecisionPolicy}, and the dtypes of frozen values inside."""
    world, found = comm.world(), {}
    for stage in (1, 2, 3):
        policy = MixedPrecisionPolicy("bfloat16", output_dtype="float32")
        model = fully_shard(wide("nf4"), world, stage, mp_policy=policy)
        with model.gathered() as module:
            dtypes = {name: str(p.data.dtype) for name, p in module.named_parameters()}
        one_pass(model, world.rank)
        norms = [float(optim.clip_grad_norm_(model.parameters(), 1e9))]
        found[stage] = model(batch(0)[0]).numpy().tobytes(), norms, dtypes
    return found


def refused():
    """{what somebody does: what they are told}."""
    world = comm.world()
    model = fully_shard(wide("nf4"), world)
    layer, found = model.module.blocks[1].mlp[0], {}
    for name, act in {"codes": lambda: layer.weight.dequantize(), "bias": lambda: layer.bias * 2,
                      "whole": lambda: model.module.norm.weight.numpy()}.items():
        found[name] = said(act)
    pieces = dict(model.named_parameters())
    x, _ = batch(world.rank)
    output = model(x).sum()
    with mt.no_grad():
        for name, piece in pieces.items():
            if name.startswith("blocks.1.norm"):
                piece[...] = 3
    found["written"] = said(output.backward)
    for name, which in ("thawed", model.module.norm), ("piece thawed", None):
        model = fully_shard(wide(None), world)
        p = model.module.norm.weight if which else dict(model.named_parameters())["norm.weight"]
        p.requires_grad_()
        found[name] = said(lambda model=model: model(x))
    return found


# ---------------------------------------------------------------- between two steps

LATER = "0.weight", "0.bias", "2.weight"       # a unit, and a part of another one


def frozen_later(stage, exact):
    """(parameters after four steps, [norm of each step's gradients], [bytes that its reduce-scatters send], [whether
    gradients of LATER were made]) of a model of three layers, of which LATER is frozen in the second and third step;
    what unused_parameters says in the second; parameters and norms of a process alone."""
    world, found = comm.world(), []
    x = np.random.default_rng(3).standard_normal((8, 5))
    for sharded in (True, False):
        mt.manual_seed(2)
        first, second, third = (nn.Linear(*shape, dtype=np.float64) for shape in ((5, 40), (40, 30), (30, 2)))
        model = module = nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), third)
        if sharded:
            model = fully_shard(module, world, stage, exact=exact, units=[first, second, third])
        optimizer = optim.AdamW(model.parameters(), 0.05, weight_decay=0.1)
        norms, sent, made, unused = [], [], [], []
        mine, size = (len(x) // world.size, 1 if exact else len(x) // world.size) if sharded else (len(x), len(x))
        first = world.rank * mine if sharded else 0
        for step in range(4):
            for name, p in model.named_parameters():
                p.requires_grad_(not (step in (1, 2) and name in LATER))
            optimizer.zero_grad()
            with ledger.record() as book:
                for i in range(first, first + mine, size):
                    (model(x[i:i + size]) ** 2).sum().backward()
            sent.append(sum(n for (_, op), n in book.bytes_sent.items() if op == "reduce_scatter"))
            made.append([p.requires_grad for name, p in module.named_parameters() if name in LATER])
            unused.append(model.unused_parameters if sharded else [])
            norms.append(optim.clip_grad_norm_(model.parameters(), 1e9))
            optimizer.step()
        found.append((full_state_dict(model) if sharded else module.state_dict(), norms, sent, made, unused))
    return found


def frozen_on_one_rank(stage):
    """The error where rank 1 alone has frozen a matrix."""
    world = comm.world()
    model = fully_shard(nn.Linear(3, 4, dtype=np.float64), world, stage)
    next(iter(model.parameters())).requires_grad_(not world.rank)
    return said(lambda: model(np.ones((2, 3))).sum().backward())


def written_in_place(stage):
    """(What the model gives, its state) when all of it has been written to in place, of ranks, and of one process."""
    world, found = comm.world(), []
    for sharded in (True, False):
        mt.manual_seed(2)
        module = nn.Sequential(nn.Linear(3, 40, dtype=np.float64), nn.Linear(40, 2, dtype=np.float64))
        for p in module[0].parameters():
            p.requires_grad_(False)
        model = fully_shard(module, world, stage) if sharded else module
        with mt.no_grad():
            for p in model.parameters():
                p *= 0.5
                p += 1
        output = model(np.ones((1, 3))).numpy()
        found.append((output, full_state_dict(model) if sharded else module.state_dict()))
    return found
