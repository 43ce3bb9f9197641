"""What the ranks do in the tests of Adafactor. What must hold is checked by the parent process."""

import pickle
from typing import NamedTuple

import numpy as np

import minitorch_dist as mt
from minitorch_dist import checkpoints, comm, ledger, nn, optim
from minitorch_dist.parallel import (
    DistributedDataParallel,
    full_optimizer_state_dict,
    full_state_dict,
    fully_shard,
    load_full_optimizer_state_dict,
)
from minitorch_dist.parallel.sharding import annotate
from minitorch_dist.parallel.tensor import tensor_parallel as tp

from . import eight_bit_cases, muon_cases, plain, sharded_cases

EPS = 1e-8, 1e-3      # above rounding's noise, which is all that the gradient of attention's keys' biases is


def combined(params):
    return optim.Combined(optim.Adafactor([p for p in params if p.ndim > 1], 0.05, eps=EPS),
                          optim.AdamW([p for p in params if p.ndim < 2], 0.01, eps=1e-6))


OPTIMIZERS = {
    "adafactor": lambda params: optim.Adafactor(params, 0.05, eps=EPS),
    "decayed": lambda params: optim.Adafactor(params, 0.05, -0.6, (1e-5, 1e-2), 1.5, 0.1),
    "combined": lambda params: combined(list(params)),
}
sharded_cases.OPTIMIZERS |= {name: lambda m, make=make: make(sharded_cases.trained(m))
                             for name, make in OPTIMIZERS.items()}


# ---------------------------------------------------------------- exact mode

def exact_curves(ways):
    """{(optimizer, way): digest of parameters and state}."""
    return {(name, way): eight_bit_cases.bits_of(eight_bit_cases.begin(way, name).run(3))
            for name in OPTIMIZERS for way in ways}


def saved(path, way, name):
    """The digest after two steps, saved, and two more."""
    run = eight_bit_cases.begin(way, name).run(2)
    checkpoints.save(path, run.model, run.optimizer, comm=run.on)
    return eight_bit_cases.bits_of(run.run(2))


def resumed(path, way, name):
    """The same of a run that goes on from what saved has left; and from whole states of rank 0, where it is cut."""
    found = []
    for whole in (False, True):
        if whole and way == "ddp":
            continue
        run = eight_bit_cases.begin(way, name).run(2)      # for its place in the data
        if whole:
            other = eight_bit_cases.begin(way, name).run(2)
            spoil(other.optimizer)
            load_full_optimizer_state_dict(other.model, other.optimizer, eight_bit_cases.whole_state(run))
            run = other
        else:
            for p in run.model.parameters():
                p.data[...] = np.nan
            spoil(run.optimizer)
            checkpoints.load(path, run.model, run.optimizer, comm=run.on)
        found.append(eight_bit_cases.bits_of(run.run(2)))
    return found


def spoil(optimizer):
    """Let its state be nobody's."""
    for array in (array for arrays in optimizer.state for array in arrays.values()):
        array[...] = np.nan


# ---------------------------------------------------------------- parameters of all shapes

class Odd(nn.Module):
    """Matrices of unequal sides, of which two ranks have parts of one row, a stack of three, one of kernels, a number,
    and a matrix of one row."""

    def __init__(self):
        super().__init__()
        random = np.random.default_rng(4)
        mt.manual_seed(4)
        self.first = nn.Linear(plain.FEATURES, 170, dtype="f8")
        self.stack = nn.Parameter(0.1 * random.standard_normal((3, 170, 37)))
        self.kernels = nn.Parameter(0.1 * random.standard_normal((5, 37, 3, 2)))
        self.scale = nn.Parameter(np.array(1.5))
        self.row = nn.Parameter(random.standard_normal((1, 37)))
        self.last = nn.Linear(30, plain.CLASSES, dtype="f8")

    def forward(self, x):
        x = mt.tanh(self.first(x)) * self.scale
        x = mt.tanh(x @ self.stack[0] + x @ self.stack[1] * self.row + x @ self.stack[2])
        return self.last(x @ mt.reshape(mt.transpose(self.kernels, (1, 0, 2, 3)), (37, 30)))


def fit(model, optimizer, steps, among=None):
    """Full-batch steps on the sum of all samples, of which each rank of `among` has some."""
    for step in steps:
        random = np.random.default_rng([31, step])
        x, ct = random.standard_normal((12, plain.FEATURES)), random.standard_normal((12, plain.CLASSES))
        mine = slice(None) if among is None else slice(among.rank, None, among.size)
        optimizer.zero_grad()
        (model(mt.tensor(x[mine])) * ct[mine]).sum().backward()
        optimizer.step()


def curves(ways):
    """{way: (parameters, the optimizer's state, on rank 0; its calls and bytes of a step, by axis and op; the bytes of
    this rank's state)}. way: None for DistributedDataParallel, or a stage."""
    world, found = comm.world(), {}
    for way in ways:
        model = Odd()
        model = DistributedDataParallel(model, world) if way is None else fully_shard(model, world, way, units=[])
        optimizer = optim.Adafactor(model.parameters(), 0.05)
        fit(model, optimizer, range(3), world)
        state = optimizer.state_dict() if way is None else full_optimizer_state_dict(model, optimizer)
        values = model.state_dict() if way is None else full_state_dict(model)
        with ledger.record() as book:
            optimizer.step()
        held = sum(a.nbytes for arrays in optimizer.state for a in arrays.values())
        found[way] = values, state, dict(book.calls), dict(book.bytes_sent), held, piece_sizes(model)
    return found


def of_given_gradients(ways, kind=optim.Adafactor, dims=None):
    """{way: digest of parameters and state} after three steps of float64, along gradients that are the same to the bit:
    so that these are, too, only what the steps add up can have other ones."""
    world, found = comm.world(), {}
    for way in ways:
        model = Odd()
        whole = {name: p.shape for name, p in model.named_parameters()}
        model = DistributedDataParallel(model, world) if way is None else fully_shard(model, world, way, units=[])
        optimizer = kind([p for name, p in model.named_parameters() if dims is None or len(whole[name]) in dims], 0.05)
        for step in range(3):
            for k, (name, p) in enumerate(model.named_parameters()):
                g = np.random.default_rng([step, k]).standard_normal(whole[name]) * 10.0 ** (step - k)
                start = 0 if way is None else p.leaf.flat.unit.piece(p)[0]
                p.grad = mt.tensor(g.reshape(-1)[start:start + p.size].reshape(p.shape))
            optimizer.step()
        state = optimizer.state_dict() if way is None else full_optimizer_state_dict(model, optimizer)
        values = model.state_dict() if way is None else full_state_dict(model)
        arrays = {f"{k} {name}": a for k, each in enumerate(state.get("state", ())) for name, a in each.items()}
        found[way] = sharded_cases.digest(values | arrays)
    return found


def piece_sizes(model):
    """[elements] of this rank's of each parameter that is no matrix."""
    return [p.size for p in model.parameters() if p.ndim < 2]


# ---------------------------------------------------------------- tensor parallelism

class Cut(NamedTuple):
    """Ranks along dp, and along tp; the stage of fully_shard, None for DistributedDataParallel."""

    dp: int
    tp: int
    stage: int | None


def of_parts(name, cut, folder=None, begin=0):
    """The whole of a model of which pairs of ranks have parts, after four steps. folder: where it is saved after two;
    begin: 2, to go on from there."""
    mesh, model = comm.DeviceMesh(dp=cut.dp, tp=cut.tp), eight_bit_cases.model(64)
    if cut.tp > 1:
        tp.parallelize_module(model, mesh["tp"], tp.plan_of(model))
    model = DistributedDataParallel(model, mesh["dp"]) if cut.stage is None else \
        fully_shard(model, mesh["dp"], cut.stage, units=[])
    optimizer = OPTIMIZERS[name](model.parameters())
    if begin:
        checkpoints.load(f"{folder}/2", model, optimizer, comm.world())
    for step in range(begin, 4):
        random = np.random.default_rng([3, step])
        optimizer.zero_grad()
        y = model(random.integers(0, 16, (3, 7)))
        mt.sum(y * (random.standard_normal(y.shape) / cut.dp)).backward()
        optimizer.step()
        if folder and not begin and step == 1:
            checkpoints.save(f"{folder}/2", model, optimizer, None, comm.world())
    if folder and begin:
        checkpoints.save(f"{folder}/{cut}", model, optimizer, None, comm.world())
    with ledger.record() as book:
        optimizer.step()
    whole = tp.full_state_dict(model) if cut.tp > 1 or cut.stage else model.state_dict()
    return whole, dict(book.calls), dict(book.bytes_sent)


# ---------------------------------------------------------------- what is refused

def refused():
    """What Adafactor says to parts of matrices."""
    world, said = comm.world(), {}

    def told(name, model):
        said[name] = sharded_cases.said(lambda: optim.Adafactor(list(model.parameters())))
    mt.manual_seed(1)
    cut = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    told("tensor parallel", tp.parallelize_module(cut, world, {"0": "column", "2": "row"}))
    annotated = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    annotate.shard_parameters(annotated, comm.DeviceMesh(tp=world.size), {"0.weight": [0, -1]})
    told("annotated", annotated)
    annotated = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    annotate.shard_parameters(annotated, comm.DeviceMesh(tp=world.size), {"0.bias": [0]})
    told("annotated vectors", annotated)
    linear = nn.Linear(6, 4)
    linear.weight = pickle.loads(pickle.dumps(cut[0].weight))
    told("copied", linear)
    for what, end in (("overlap", 4), ("gap", 2)):
        rows = np.arange(3, 6) if world.rank else np.arange(end)
        shared = tp.ColumnParallelLinear(nn.Linear(5, 6, dtype="f8"), world, rows)
        shared.weight.grad = mt.zeros_like(shared.weight)
        said[what] = sharded_cases.said(optim.Adafactor([shared.weight]).step)
    return said


def disagreeing(how):
    """muon_cases', of Adafactor."""
    return muon_cases.disagreeing(how, optim.Adafactor)
