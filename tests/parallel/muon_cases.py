"""What the ranks do in test_muon."""

import itertools
import math
import pickle

import numpy as np

import minitorch_dist as mt
from minitorch_dist import checkpoints, comm, ledger, nn, optim
from minitorch_dist.optim.matrices import Cut, brought_together
from minitorch_dist.parallel import (
    DistributedDataParallel,
    full_optimizer_state_dict,
    full_state_dict,
    fully_shard,
    load_full_optimizer_state_dict,
)
from minitorch_dist.parallel.offload import offload_optimizer
from minitorch_dist.parallel.sharding import annotate
from minitorch_dist.parallel.tensor import ColumnParallelLinear, parallelize_module
from minitorch_dist.parallel.tensor import full_state_dict as full_state

from . import plain


def net():
    """Matrices of which each rank of two or three has a part, one of a single rank, and vectors."""
    mt.manual_seed(9)
    return nn.Sequential(nn.Linear(plain.FEATURES, 700, dtype="f8"), nn.Tanh(), nn.Linear(700, 13, dtype="f8"),
                         nn.Tanh(), nn.Linear(13, plain.CLASSES, dtype="f8"))


def optimizer_of(model, kind=optim.Muon):
    params = list(model.parameters())
    return optim.Combined(kind([p for p in params if p.ndim == 2], lr=0.02),
                          optim.AdamW([p for p in params if p.ndim != 2], lr=0.01))


def fit(model, optimizer, steps):
    """Full-batch steps on the sum of all ranks' samples: the same batch, whoever has which."""
    world = comm.world()
    for step in steps:
        random = np.random.default_rng([31, step])
        x, ct = random.standard_normal((12, plain.FEATURES)), random.standard_normal((12, plain.CLASSES))
        optimizer.zero_grad()
        mine = slice(world.rank, None, world.size) if hasattr(model, "units") else slice(None)
        (model(mt.tensor(x[mine])) * ct[mine]).sum().backward()
        optimizer.step()


def counted(stage, kind=optim.Muon):
    """(ledger's calls and bytes of a step, [(shape, elements by rank, owner)], unit sizes)."""
    model = fully_shard(net(), comm.world(), stage=stage, units=[])
    optimizer = optimizer_of(model, kind)
    fit(model, optimizer, range(1))
    with ledger.record() as book:
        optimizer.step()
    cuts = [unit.cut_of(piece)[1:] for unit in model.units for piece in unit.pieces if piece.ndim == 2]
    calls, sent = ({op: n for (_, op), n in by.items()} for by in (book.calls, book.bytes_sent))
    return calls, sent, cuts


def together():
    """Matrices of known numbers: what each rank gets back is its part of what `make` has made of the whole."""
    world, made = comm.world(), []
    counts = [[3, 0, 4], [0, 0, 5], [1, 1, 1], [6, 2, 0]]
    shapes = [(1, 7), (5, 1), (3, 1), (2, 4)]
    whole = [np.random.default_rng(k).standard_normal(sum(c)) for k, c in enumerate(counts)]
    starts = [sum(c[:world.rank]) for c in counts]
    parts = [w[s:s + c[world.rank]] for w, s, c in zip(whole, starts, counts, strict=True)]

    def make(k, u):
        made.append(k)
        assert (u == whole[k]).all()
        return u[::-1] * (k + 2)
    ends = [np.cumsum([0, *c]) for c in counts]
    ways = [[Cut(world, name, shape, (math.prod(shape),), [slice(*pair) for pair in itertools.pairwise(end)], c)]
            for name, shape, c, end in zip("abcd", shapes, counts, ends, strict=True)]
    found = brought_together([world], ways, parts, make, parts[0])
    wanted = [(w[::-1] * (k + 2))[s:s + c[world.rank]]
              for k, (w, s, c) in enumerate(zip(whole, starts, counts, strict=True))]
    return made, all((f == w).all() and f.shape == w.shape for f, w in zip(found, wanted, strict=True))


def restored(folder, way):
    """Three steps, saved, three more; and the other three again, from what was saved: both digests, on rank 0."""
    model = fully_shard(net(), comm.world(), stage=3, units=[])
    optimizer = optimizer_of(model)
    fit(model, optimizer, range(3))
    if way == "full state":
        state, of_optimizer = full_state_dict(model), full_optimizer_state_dict(model, optimizer)
    else:
        checkpoints.Checkpoints(folder, comm.world()).save(3, model, optimizer)
    fit(model, optimizer, range(3, 6))
    again = fully_shard(net(), comm.world(), stage=2, units=[])
    other = optimizer_of(again)
    if way == "full state":
        again.load_state_dict(state)
        load_full_optimizer_state_dict(again, other, of_optimizer)
    else:
        checkpoints.Checkpoints(folder, comm.world()).load(again, other)
    fit(again, other, range(3, 6))
    return full_state_dict(model), full_state_dict(again), of_optimizer if way == "full state" else None


def disagreeing(how, make=optim.Muon):
    """What a step says whose ranks have other gradients, or give other matrices, or another order of them."""
    world = comm.world()
    mt.manual_seed(4)
    model = fully_shard(nn.Sequential(nn.Linear(80, 80, dtype="f8"), nn.Linear(80, 80, dtype="f8")), world,
                        units=[] if how != "order" else None)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    if how == "order" and world.rank == 0:
        matrices = matrices[::-1]
    optimizer = make(matrices[world.rank:world.rank + 1] if how == "others" else matrices)
    x = np.random.default_rng(world.rank).standard_normal((3, 80))
    model(mt.tensor(x)).sum().backward()
    if how == "gradients":
        matrices[world.rank].grad = None
    if how == "one has none" and world.rank:
        for p in matrices:
            p.grad = None
    try:
        optimizer.step()
    except Exception as error:
        return type(error).__name__
    return "nothing"


def refused():
    """What Muon says to parts of matrices."""
    world, said = comm.world(), {}

    def told(name, model):
        try:
            optim.Muon([p for p in model.parameters() if p.ndim > 1])
            said[name] = None
        except ValueError as error:
            said[name] = str(error)
    mt.manual_seed(1)
    cut = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    told("tensor parallel", parallelize_module(cut, world, {"0": "column", "2": "row"}))
    annotated = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    annotate.shard_parameters(annotated, comm.DeviceMesh(tp=world.size), {"0.weight": [0, -1]})
    told("annotated", annotated)
    both = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    mesh = comm.DeviceMesh(dp=1, tp=world.size)
    told("both", fully_shard(parallelize_module(both, mesh["tp"], {"0": "column", "2": "row"}), mesh["dp"]))
    linear = nn.Linear(6, 4)
    linear.weight = pickle.loads(pickle.dumps(cut[0].weight))
    told("copied", linear)
    experts = nn.MoE(6, 8, 2 * world.size, k=1)
    told("experts", parallelize_module(nn.Sequential(experts), world, {"0": "experts"}))
    return said


PLAN = {"0": "column", "2": "row", "4": "column, gathered"}


def tensor_parallel(sizes, stage=None, bucket_of_rank_1=25):
    """(net's mesh, what it is trained by) with parts over "tp", pieces of them (or copies) over "dp"."""
    mesh, model = comm.DeviceMesh(**sizes), net()
    parallelize_module(model, mesh["tp"], PLAN)
    if stage is None:
        cap = bucket_of_rank_1 if mesh["tp"].rank == 1 else 25
        return mesh, DistributedDataParallel(model, mesh["dp"], bucket_cap_mb=cap, first_bucket_mb=cap)
    return mesh, fully_shard(model, mesh["dp"], stage=stage, units=[])


def fit_parts(wrapped, axis, optimizer, steps):
    """As fit, the samples divided over this axis."""
    for step in steps:
        random = np.random.default_rng([31, step])
        x, ct = random.standard_normal((12, plain.FEATURES)), random.standard_normal((12, plain.CLASSES))
        optimizer.zero_grad()
        mine = slice(axis.rank, None, axis.size)
        (wrapped(mt.tensor(x[mine])) * ct[mine]).sum().backward()
        optimizer.step()


def of_parts(sizes, *how, kind=optim.Muon):
    """(whole parameters after three steps and fit on, the ledger's calls and bytes by axis of another step)."""
    mesh, wrapped = tensor_parallel(sizes, *how)
    optimizer = optimizer_of(wrapped, kind)
    fit_parts(wrapped, mesh["dp"], optimizer, range(3))
    with ledger.record() as book:
        optimizer.step()
    fit_parts(wrapped, mesh["dp"], optimizer, range(3, 4))
    state = full_state(wrapped)
    sent = {axis: book.bytes_sent[axis, "all_to_all"] for axis, op in book.bytes_sent if op == "all_to_all"}
    return state, {axis: n for (axis, op), n in book.calls.items() if op == "all_to_all"}, sent, mesh.coords


def mixed_up():
    """{in what: what a step over "tp" says on ranks that differ}."""
    axis, said = comm.DeviceMesh(tp=2)["tp"], {}
    models = [[p for p in parallelize_module(net(), axis, PLAN).parameters() if p.ndim == 2] for _ in range(2)]
    rows = np.arange(3, 6) if axis.rank else np.arange(4)
    shared = ColumnParallelLinear(nn.Linear(5, 6, dtype="f8"), axis, rows)
    for how, matrices in (("order", models[0][::-1] if axis.rank else models[0]), ("model", models[axis.rank]),
                          ("overlap", [shared.weight])):
        optimizer = optim.Muon(matrices)
        try:
            optimizer.step()
        except ValueError as error:
            said[how] = str(error)
    return said


def offloaded(folder):
    """Whether the steps are those without; of units in which a rank has no element of the matrices."""
    found = []
    for away in (False, True):
        mt.manual_seed(2)
        model = fully_shard(nn.Sequential(nn.Linear(6, 70, dtype="f8"), nn.Tanh(), nn.Linear(70, 4, dtype="f8")),
                            comm.world())
        optimizer = optim.AdamW([p for p in model.parameters() if p.ndim == 2], lr=0.01)
        if away:
            offload_optimizer(optimizer, folder)
        for step in range(2):
            model.zero_grad()
            (model(mt.tensor(np.random.default_rng(step).standard_normal((5, 6)))) ** 2).sum().backward()
            optimizer.step()
        found.append([p.numpy().copy() for p in model.parameters()])
    return all((a == b).all() for a, b in zip(*found, strict=True))
