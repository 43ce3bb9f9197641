"""What the ranks do in the tests of communication hooks."""

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, ledger, nn, optim
from minitorch_dist.parallel import DistributedDataParallel
from minitorch_dist.parallel.comm_hooks import OneBit, PowerSGD, TopK, fp16_compress

from .ddp_cases import digest, grads_of

SHAPES = {"a": (37, 29), "b": (29,), "c": (3, 5), "d": (41, 2, 11)}


class Bag(nn.Module):
    """Parameters whose gradients are whatever one multiplies them with."""

    def __init__(self):
        super().__init__()
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(np.zeros(shape, np.float32)))

    def forward(self, cts):
        return sum(((getattr(self, name) * ct).sum() for name, ct in cts.items()), mt.tensor(np.float32(0)))


def hook_cotangents(kind, rank, step=0):
    """float32 gradients of rank `rank`: "full", or matrices of rank 2 in a space that all ranks share."""
    random = np.random.default_rng([3, rank, step])
    cts = {name: random.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    if kind == "thin":
        shared = np.random.default_rng(8)
        for name in ("a", "d"):
            n, m = SHAPES[name][0], int(np.prod(SHAPES[name][1:]))
            basis = shared.standard_normal((n, 2))
            cts[name] = (basis @ random.standard_normal((2, m))).reshape(SHAPES[name]).astype(np.float32)
    return cts


def hooked(hook, cts, steps=1):
    """The summed gradients of each step, and what the last one cost."""
    world = comm.world()
    model = DistributedDataParallel(Bag(), world)
    if hook is not None:
        model.register_comm_hook(hook)
    sums = []
    for step in range(steps):
        model.zero_grad()
        with ledger.record() as book:
            model(cts(step)).backward()
        sums.append({name: g.copy() for name, g in grads_of(model).items()})
    return sums, {op: n for (_, op), n in book.bytes_sent.items()}, dict(book.calls)


def comm_hooks():
    """{name: hooked(…)}."""
    rank = comm.world().rank

    def full(step):
        return hook_cotangents("full", rank, step)

    def constant(step):
        return hook_cotangents("full", rank)

    def thin(step):
        return hook_cotangents("thin", rank, step)
    return {"none": hooked(None, full), "fp16": hooked(fp16_compress, full),
            "power, thin": hooked(PowerSGD(rank=2), thin), "power, constant": hooked(PowerSGD(rank=2), constant, 40),
            "one bit": hooked(OneBit(), full, 4), "top": hooked(TopK(0.1), full, 4),
            "fp16 overflow": hooked(fp16_compress, lambda step: {k: v * 1e6 for k, v in full(step).items()})}


HOOKS = {"power": lambda scaler=None: PowerSGD(rank=2, scaler=scaler),
         "one bit": lambda scaler=None: OneBit(scaler), "top": lambda scaler=None: TopK(0.3, scaler)}


def with_gaps(name):
    """A hook where a matrix is unused in some steps, and its first gradient is zeros, then never in row 0:
    (what was handed out in all, what is left out here, the gradients of this rank in all)."""
    world, hook = comm.world(), HOOKS[name]()
    model = DistributedDataParallel(Bag(), world)
    model.register_comm_hook(hook)
    handed, own = np.zeros(SHAPES["a"]), np.zeros(SHAPES["a"])
    for step in range(30):
        model.zero_grad()
        cts = hook_cotangents("full", world.rank, step)
        cts["a"][0] = 0
        if step == 0:
            cts["a"][:] = 0
        if step % 3 == 2:
            del cts["a"]
        model(cts).backward()
        own += cts.get("a", 0)
        if model.module.a.grad is not None:
            handed += model.module.a.grad.numpy()
    return handed, hook.left_out[model.module.a.leaf].reshape(own.shape), own


def hooked_training(hook):
    """Losses of a small regression with each hook."""
    world = comm.world()
    mt.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 10)), world)
    if hook is not None:
        model.register_comm_hook(fp16_compress if hook == "fp16" else HOOKS[hook]())
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    random = np.random.default_rng(world.rank)
    teacher = np.random.default_rng(99).standard_normal((20, 10)).astype(np.float32)
    losses, digests = [], []
    for _ in range(60):
        x = random.standard_normal((8, 20)).astype(np.float32)
        labels = (x @ teacher).argmax(axis=1)
        optimizer.zero_grad()
        loss = nn.cross_entropy(model(mt.tensor(x)), labels, reduction="sum") / (8 * world.size)
        loss.backward()
        total = np.array([loss.item()])
        world.all_reduce(total)
        optimizer.step()
        losses.append(float(total[0]))
        digests.append(digest(model))
    return losses, digests


def with_a_step_skipped(name, steps):
    """A hook's sums of the steps of these numbers; in step 2 the last rank's backward raises, and all skip it."""
    world, sums = comm.world(), []
    mt.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8, dtype=np.float64), nn.Linear(8, 8, dtype=np.float64)),
                                    world)
    model.register_comm_hook(HOOKS[name]())
    for step in steps:
        model.zero_grad()
        between = model.module[0](mt.tensor(np.random.default_rng([step, world.rank]).standard_normal((5, 8))))
        if step == 2 and world.rank == world.size - 1:
            between.register_hook(lambda ct: 1 / 0)
        try:
            (model.module[1](between) ** 2).sum().backward()
            sums.append({name: g.copy() for name, g in grads_of(model).items()})
        except (RuntimeError, ZeroDivisionError):
            pass
    return sums
