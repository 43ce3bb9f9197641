"""What the ranks do in the tests of Dion over gradients that nobody sums."""

import numpy as np

import minitorch_dist as mt
from minitorch_dist import checkpoints, comm, data, ledger, nn, optim
from minitorch_dist.parallel import DistributedDataParallel, fully_shard
from minitorch_dist.parallel.noise_scale import GradientNoiseScale
from minitorch_dist.parallel.pipelines import Pipeline, cut_sequential
from minitorch_dist.parallel.pipelines.schedules import one_forward_one_backward

from . import plain
from .sharded_cases import digest, said

HIDDEN, SHARE = 31, 0.1


class Net(nn.Module):
    """Matrices and a stack of them; `side` is used by samples that say so alone."""

    def __init__(self, dtype="f8"):
        super().__init__()
        mt.manual_seed(9)
        self.first = nn.Linear(plain.FEATURES, HIDDEN, dtype=dtype)
        self.stack = nn.Parameter(0.2 * np.random.default_rng(2).standard_normal((3, HIDDEN, HIDDEN)).astype(dtype))
        self.side = nn.Linear(HIDDEN, HIDDEN, bias=False, dtype=dtype)
        self.last = nn.Linear(HIDDEN, plain.CLASSES, dtype=dtype)

    def forward(self, x, side=True):
        x = mt.tanh(self.first(x))
        for k in range(3):
            x = x + mt.tanh(x @ self.stack[k])
        return self.last(x + self.side(x) if side else x)


def hidden(net):
    return [net.first.weight, net.stack, net.side.weight]


def others(net):
    return [net.first.bias, *net.last.parameters()]


def begin(over=None, dtype="f8", unsummed=True, **options):
    """(the model, its optimizer): over a Communicator, or in one process."""
    net = Net(dtype)
    model = net if over is None else DistributedDataParallel(
        net, over, unsummed=hidden(net) if unsummed else (), bucket_cap_mb=0.02, **options)
    return model, optim.Combined(optim.Dion(hidden(net), 0.02, SHARE), optim.AdamW(others(net), 0.01))


def batch(step, dtype="f8"):
    random = np.random.default_rng([31, step])
    return random.standard_normal((24, plain.FEATURES)).astype(dtype), \
        random.standard_normal((24, plain.CLASSES)).astype(dtype)


def backward(model, step, over, side=True, scale=1.0):
    """Of this rank's samples of a batch of 24, in two parts."""
    x, ct = batch(step, next(model.parameters()).dtype)
    mine = slice(None) if over is None else slice(over.rank, None, over.size)
    x, ct = x[mine], scale * ct[mine]
    model.zero_grad()
    half = len(x) // 2
    if over is None:
        (model(mt.tensor(x), side) * ct).sum().backward()
        return
    with model.no_sync():
        (model(mt.tensor(x[:half]), side) * ct[:half]).sum().backward()
    (model(mt.tensor(x[half:]), side) * ct[half:]).sum().backward()


def fit(model, optimizer, steps, over=None, side=lambda step: True):
    for step in steps:
        backward(model, step, over, side(step))
        optimizer.step()


def state_of(model, optimizer):
    """(parameters, [state of each parameter], numbers of steps)."""
    saved = optimizer.state_dict()
    return model.state_dict(), saved["state"], saved["steps"]


def momenta(optimizer):
    """This rank's, of the matrices."""
    return [s.state(state)["momentum_buffer"].copy() for _, state, s in optimizer.optimizers[0]._places()]


def trained(steps):
    """State of a run, and of one whose `side` only rank 0 uses, in some steps nobody; this rank's momenta, before that
    and after."""
    world, found = comm.world(), []
    for side in (lambda step: True, lambda step: step % 3 and world.rank == 0):
        model, optimizer = begin(world)
        fit(model, optimizer, range(steps), world, side)
        own = momenta(optimizer)
        found.append((*state_of(model, optimizer), own, momenta(optimizer)))
    return found


def counted(unsummed):
    """The ledger's calls and bytes sent, by op, of the first step, a backward pass, and a step, float32."""
    world = comm.world()
    model, optimizer = begin(world, "f4", unsummed)
    backward(model, 0, world)           # after which buckets are cut anew
    with ledger.record() as book:
        optimizer.step()
    x, ct = batch(2, "f4")
    model.zero_grad()
    books = [book]
    with ledger.record() as book:
        (model(mt.tensor(x)) * ct).sum().backward()
    books.append(book)
    with ledger.record() as book:
        optimizer.step()
    books.append(book)
    return [({op: n for (_, op), n in b.calls.items()}, {op: n for (_, op), n in b.bytes_sent.items()}) for b in books]


def saved(folder):
    """A digest on each rank after three steps, saved, and three more."""
    world = comm.world()
    model, optimizer = begin(world)
    fit(model, optimizer, range(3), world)
    checkpoints.save(f"{folder}/3", model, optimizer, None, world)
    fit(model, optimizer, range(3, 6), world)
    return digest(model.state_dict()), model.state_dict()


def resumed(folder):
    """The same of a run that goes on, on as many ranks as there are."""
    world = comm.world()
    model, optimizer = begin(world if world.size > 1 else None)
    checkpoints.load(f"{folder}/3", model, optimizer, world)
    fit(model, optimizer, range(3, 6), world if world.size > 1 else None)
    return digest(model.state_dict()), model.state_dict()


def scaled():
    """Whether parameters are alike after steps of which one is left out, since a gradient of rank 0 is inf; the
    scaler's factor, and the numbers of steps."""
    world = comm.world()
    model, optimizer = begin(world, "f4")
    scaler = optim.GradScaler(init_scale=2.0 ** 8)
    for step in range(3):
        backward(model, step, world, scale=2.0 ** 8)
        if step == 1 and world.rank == 0:
            model.module.side.weight.grad.data[1, 2] = np.inf
        scaler.step(optimizer)
        scaler.update()
    return model.state_dict(), scaler.get_scale(), optimizer.state_dict()["steps"]


def besides():
    """(parameters after batches of unequal numbers with join, and an exception in all ranks' backward; what is said)"""
    world = comm.world()
    model, optimizer = begin(world)
    with model.join(optimizer.step) as count:
        for step in range(2 + world.rank):
            x, ct = batch(10 * world.rank + step)
            model.zero_grad()
            ((model(mt.tensor(x)) * ct).sum() / count(len(x))).backward()
            optimizer.step()

    def fail(grad):
        raise ZeroDivisionError
    hook = model.module.first.bias.register_hook(fail)
    failed = said(lambda: backward(model, 5, world))
    hook.remove()
    fit(model, optimizer, [6], world)
    return model.state_dict(), failed


def layers():
    mt.manual_seed(0)
    return nn.Sequential(nn.Linear(plain.FEATURES, 20, dtype="f8"), nn.Tanh(), nn.Linear(20, 18, dtype="f8"), nn.Tanh(),
                         nn.Linear(18, plain.CLASSES, dtype="f8"))


def optimizer_of(model):
    params = list(model.parameters())
    return optim.Combined(optim.Dion([p for p in params if p.ndim == 2], 0.02, 0.2),
                          optim.AdamW([p for p in params if p.ndim < 2], 0.01))


def loss_sum(y, labels):
    return nn.cross_entropy(y, labels, reduction="sum")


def batches(steps):
    random = np.random.default_rng(1)
    x, labels = random.standard_normal((24, plain.FEATURES)), random.integers(0, plain.CLASSES, 24)
    loader = data.Loader(x, labels, 24, seed=2)
    return [next(iter(loader.epoch(step))) for step in range(steps)]


def in_a_pipeline(steps):
    """All stages' parameters, in order, after some steps."""
    world = comm.world()
    stage = cut_sequential(layers(), world.size)[world.rank]
    pipeline, optimizer = Pipeline([stage], world, one_forward_one_backward(world.size, 4)), optimizer_of(stage)
    for step, each in enumerate(batches(steps)):
        optimizer.zero_grad()
        pipeline.run(each, loss_sum, seed=0, step=step)
        optimizer.step()
    return [a for part in world.all_gather_object([p.numpy() for p in stage.parameters()]) for a in part]


def refused():
    """{what: what is said}."""
    world = comm.world()
    net = Net()
    found = {
        "exact": said(lambda: begin(world, exact=True)),
        "stranger": said(lambda: DistributedDataParallel(net, world, unsummed=[Net().first.weight])),
        "differ": said(lambda: DistributedDataParallel(net, world, unsummed=hidden(net)[world.rank:world.rank + 1])),
        "pieces": said(lambda: optim.Dion([p for p in fully_shard(nn.Linear(40, 30), world).parameters()
                                           if p.ndim == 2]))}
    model, optimizer = begin(world)
    found["AdamW"] = said(lambda: optim.AdamW(model.parameters()))
    before = Net()
    early = optim.SGD(before.parameters(), 0.1)
    DistributedDataParallel(before, world, unsummed=hidden(before))
    found["SGD made before"] = said(early.step)
    backward(model, 0, world)
    found["clip"] = said(lambda: optim.clip_grad_norm_(model.parameters(), 1.0))
    found["noise"] = said(lambda: GradientNoiseScale(model))
    found["clip the others"] = said(lambda: optim.clip_grad_norm_(others(model.module), 1.0))
    found["step"] = said(optimizer.step)
    return found


def order():
    """What a step says whose ranks give other orders of parameters."""
    world = comm.world()
    net = Net()
    model = DistributedDataParallel(net, world, unsummed=hidden(net))
    optimizer = optim.Dion(hidden(net)[::-1] if world.rank else hidden(net))
    backward(model, 0, world)
    return said(optimizer.step).partition(":")[0]
