"""What ranks do in the tests of the compiler."""

import hashlib

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, ledger, nn, optim
from minitorch_dist.parallel import DistributedDataParallel, full_state_dict, fully_shard
from tests.parallel import cases


def compile_at_once():
    """The digest of a function's values, compiled on all ranks at the same time."""
    world = comm.world()
    world.barrier()
    compiled = mt.compile(lambda x: mt.softmax(mt.exp(x) * 1.25), emit="c")
    y = compiled(mt.tensor(np.linspace(0.0, 1.0, 12).reshape(3, 4)))
    assert not compiled.breaks
    return hashlib.sha256(y.numpy().tobytes()).hexdigest()


def train(exact=False, dropout=True, steps=12, compiled=True, emit="numpy", outside=False, world=None):
    """(losses, digests, parameters) of the model of parallel/cases.py, compiled within or around the wrapper."""
    rank, size = (0, 1) if world is None else (world.rank, world.size)
    model = cases.model_with_dropout(np.float64) if dropout else cases.small_model()
    made = model = mt.compile(model, emit=emit) if compiled and not outside else model
    if world is not None:
        model = DistributedDataParallel(model, world, exact=exact, **({"micro_shards": 4} if exact else {}))
    if compiled and outside:
        made = model = mt.compile(model, emit=emit)
    loader = cases.loader_for(np.float64, rank, size, 4 if exact else 1)
    losses, digests = cases.train(model, optim.Adam(model.parameters(), lr=0.01), loader, steps, world,
                                  micro_shards=4 if exact else 8)
    assert not compiled or not made.breaks, made.breaks
    return losses, digests, cases.parameters(model)


def trainings():
    """{name: (losses, digests, parameters)} by all ranks."""
    world = comm.world()
    return {"ddp": train(world=world), "ddp in c": train(world=world, emit="c", dropout=False),
            "exact": train(exact=True, world=world)}


class Normed(nn.Module):
    """BatchNorm in the middle: its statistics go over all ranks."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(7, 5, dtype=np.float64), nn.BatchNorm(5, dtype=np.float64)
        self.last = nn.Linear(5, 5, dtype=np.float64)

    def forward(self, x):
        return self.last(mt.tanh(self.norm(self.first(x))))


def batch_norm(compiled=True):
    """(parameters and buffers after some steps) of a model with BatchNorm on these ranks."""
    world = comm.world()
    mt.manual_seed(4)
    model = Normed()
    model = mt.compile(model, emit="numpy") if compiled else model
    model = DistributedDataParallel(model, world)
    loader = cases.loader_for(np.float64, world.rank, world.size)
    cases.train(model, optim.Adam(model.parameters(), lr=0.01), loader, 6, world)
    return cases.parameters(model), {name: np.array(b) for name, b in model.named_buffers()}


class Again(nn.Module):
    """A block that backward runs again."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return mt.checkpoint(self.block)(x)


def units_of_stage_3(way="plain", compiled=True, emit="numpy", steps=3, device="cpu"):
    """(losses of this rank's rows, parameters, {(axis, op): calls}, bytes sent, most bytes kept for backward,
    [captures], reasons to run uncompiled) of a GPT in ZeRO 3, whose blocks are compiled."""
    world, exact = comm.world(), way == "exact"
    mt.manual_seed(2)
    gpt = nn.GPT(23, 8, 3, 4, 16, dropout=0.2 if way == "dropout" else 0.0, tied=False, dtype=np.float64,
                 mlp="swiglu", norm="rms", positions="rotary", bias=False).to(device)
    made = [mt.compile(block, emit) for block in gpt.blocks] if compiled else []
    for i, block in enumerate(made or list(gpt.blocks)):
        gpt.blocks[i] = Again(block) if way == "checkpoint" else block
    if way == "frozen":
        for name, p in gpt.named_parameters():
            p.requires_grad_("blocks" not in name or "attention" in name)
    model = fully_shard(gpt, world, 3, exact=exact, micro_shards=4,
                        reshard_after_forward=False if way == "kept" else 2 if way == "near" else True)
    optimizer = optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses, kept = [], 0
    for step in range(steps):
        rows = mt.backend.to(np.random.default_rng(step).integers(0, 23, (4, 9)), device)
        parts = np.array_split(np.arange(4), 4 if exact else world.size)
        parts = parts[world.rank * len(parts) // world.size:(world.rank + 1) * len(parts) // world.size]
        with ledger.record(memory=True) as book:
            for part in parts:
                with mt.backend.random_scope(0, step, 4, (int(part[0]), int(part[-1]) + 1), 4):
                    loss = nn.cross_entropy(model(rows[part, :-1]), rows[part, 1:], "sum") / 32
                losses.append(loss.item())
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        kept = max(kept, book.peak["activation"])
    state = {name.replace(".block.", "."): np.array(value) for name, value in full_state_dict(model).items()}
    return (losses, state, dict(book.calls), book.total_bytes_sent(), kept, [block.compiled.captures for block in made],
            [reason for block in made for reason in block.breaks])


class Residual(nn.Module):
    """A block that runs itself again."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=np.float64)

    def forward(self, x):
        return mt.checkpoint(lambda x: x + mt.tanh(self.linear(x)))(x)


def captured_at_different_times(compiled=True):
    """The state after steps in ZeRO 3 in which the ranks have other numbers of rows, and so capture at other times."""
    world = comm.world()
    mt.manual_seed(2)
    blocks = [nn.Linear(4, 4, dtype=np.float64), Residual(), Residual()]
    blocks = [mt.compile(block, "numpy") for block in blocks] if compiled else blocks
    model = fully_shard(nn.Sequential(*blocks, nn.Linear(4, 2, dtype=np.float64)), world, 3, units=blocks)
    optimizer = optim.SGD(model.parameters(), 0.01)
    for step, rows in enumerate(((1, 1), (2, 1), (2, 3), (1, 3))):
        x = np.random.default_rng([step, world.rank]).standard_normal((rows[world.rank], 4))
        optimizer.zero_grad()
        mt.sum(model(x) ** 2).backward()
        optimizer.step()
    return world.broadcast_object(full_state_dict(model))
