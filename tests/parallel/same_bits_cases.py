"""What ranks do in the tests of replicas that part."""

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, data, ledger, nn, optim, training
from minitorch_dist.comm import DeviceMesh
from minitorch_dist.parallel import DistributedDataParallel, fully_shard
from minitorch_dist.parallel.same_bits import ReplicaError, check_same_bits

SIZES = 7, 5, 3


def network(dtype=np.float32):
    mt.manual_seed(4)
    return nn.Sequential(nn.Linear(SIZES[0], SIZES[1], dtype=dtype), nn.Tanh(),
                         nn.Linear(SIZES[1], SIZES[2], dtype=dtype))


def wrapped(way, world):
    """A model on all ranks: "ddp", or fully_shard in a stage with two copies, or with one."""
    if way == "ddp":
        return DistributedDataParallel(network(), world)
    stage, copies = way
    mesh = DeviceMesh(replicate=copies, shard=world.size // copies)
    return fully_shard(network(), mesh["replicate", "shard"], stage, shard_over=mesh["shard"])


def step(model, optimizer, rank, spoil=None):
    """One step; spoil(model), if given, between the sums and the optimizer, or (if its name is "work") before them."""
    random = np.random.default_rng(rank)
    optimizer.zero_grad()
    loss = (model(mt.tensor(random.standard_normal((4, SIZES[0])).astype(np.float32))) ** 2).sum()
    (loss * 1.001 if spoil == "work" else loss).backward()
    if callable(spoil):
        spoil(model)
    optimizer.step()


def flip(array, element, bit):
    array.reshape(-1).view(f"u{array.dtype.itemsize}")[element] ^= 1 << bit


def said(model, at=None):
    """What the check says, None where all is well."""
    try:
        check_same_bits(model, at)
    except ReplicaError as error:
        return str(error)
    return None


def parting(way, spoiled, name, element, bit, what="parameter"):
    """(what is said before, after the flip on these ranks, and three steps later; the value and what it was)"""
    world = comm.world()
    model = wrapped(way, world)
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    for i in range(2):
        step(model, optimizer, world.rank + 10 * i)
    before, values = said(model, 2), {}
    here = world.rank in spoiled

    def spoil(model):
        p = dict(model.named_parameters())[name]
        array = p.data if what == "parameter" else p.grad.data
        if here and array.size > element:
            values["old"] = float(array.reshape(-1)[element])
            flip(array, element, bit)
            values["new"] = float(array.reshape(-1)[element])
    if what == "parameter":
        spoil(model)
    else:
        step(model, optimizer, world.rank, "work" if what == "work" and here else spoil if what == "gradient" else None)
    after = said(model, 3)
    for i in range(3):
        step(model, optimizer, world.rank + 10 * i)
    return before, after, said(model), values


def checked_work(dropout, rows=13, recomputed=False):
    """What check_work says of ranks that are right, then of a rank 1 that is wrong by 2⁻²⁰, for two shards of a batch
    of so many rows; recomputed: of layers whose forwards are checkpoints."""
    world = comm.world()
    mt.manual_seed(4)
    module = nn.Sequential(nn.Linear(SIZES[0], SIZES[1]), nn.Dropout(dropout), nn.Linear(SIZES[1], SIZES[2]))
    for layer in module if recomputed else ():
        layer.forward = mt.checkpoint(layer.forward)
    model = DistributedDataParallel(module, world)
    random = np.random.default_rng(5)
    x, labels = random.standard_normal((13, SIZES[0])).astype(np.float32), random.integers(0, SIZES[2], 13)
    loader = data.Loader(x, labels, 13 - rows or 13, rank=world.rank, size=world.size)
    *_, batch = loader.epoch(0)
    step(model, optim.SGD(model.parameters(), lr=0.01), world.rank)
    for p in model.parameters():
        p.grad.data[...] += world.rank      # as after no_sync()
    before = [(p.numpy().copy(), p.grad.numpy().copy()) for p in model.parameters()]

    def loss_sum(model, shard, factor=1.0):
        return nn.cross_entropy(model(shard.inputs), shard.labels, reduction="sum") * factor

    def wrong(model, shard):
        return loss_sum(model, shard, 1 + 2 ** -20 if world.rank == 1 else 1.0)
    found = []
    for loss, turn in ((loss_sum, 3), (wrong, 0), (wrong, 1)):
        try:
            training.check_work(model, batch, loss, world, seed=7, step=5, turn=turn)
            found.append(None)
        except ReplicaError as error:
            found.append(str(error))
    for p, (value, grad) in zip(model.parameters(), before, strict=True):
        assert (p.numpy() == value).all() and (p.grad.numpy() == grad).all()
    return found


def bytes_sent(way):
    """{(axis, op): (calls, bytes)} of one check of what is the same."""
    world = comm.world()
    model = wrapped(way, world)
    with ledger.record() as book:
        check_same_bits(model)
    return {op: (book.calls[axis, op], book.bytes_sent[axis, op]) for axis, op in book.calls}


def no_copy():
    """The error where nothing is held twice."""
    model = fully_shard(network(), comm.world(), 3)
    try:
        check_same_bits(model)
    except ValueError as error:
        return str(error)


class Gate(nn.Module):
    """x, scaled by a parameter when it is open."""

    def __init__(self):
        super().__init__()
        self.temp, self.open = nn.Parameter(np.full(1, 1.5, np.float32)), False

    def forward(self, x):
        return mt.tanh(x * self.temp) if self.open else mt.tanh(x)


def parted_beside_matrices(wrap):
    """[what is said after two steps, and after two more with a gate between column and row], on a mesh of two ranks
    along tp."""
    from minitorch_dist.parallel.tensor import parallelize_module  # it brings further ops
    mesh = DeviceMesh(dp=-1, tp=2)
    mt.manual_seed(4)
    model = nn.Sequential(nn.LayerNorm(SIZES[0]), nn.Linear(SIZES[0], 6), Gate(), nn.Linear(6, SIZES[2]))
    gate = model[2]
    parallelize_module(model, mesh["tp"], {"1": "column", "3": "row"})
    model = DistributedDataParallel(model, mesh["dp"]) if wrap else model
    optimizer, found = optim.SGD(model.parameters(), lr=0.01), []
    for i in range(4):
        gate.open = i > 1       # the row has looked at its first forward alone
        step(model, optimizer, mesh.coords["dp"] + 10 * i)
        found += [said(model, i + 1)] * (i % 2)
    return found
