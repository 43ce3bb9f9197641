"""What the ranks do in the tests of tensor parallelism's misuses. What must hold is checked by the parent process."""

import copy

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, nn
from minitorch_dist.parallel import DistributedDataParallel, fully_shard
from minitorch_dist.parallel.collectives import copy_to, gather_from, scatter_to
from minitorch_dist.parallel.context import context_parallel
from minitorch_dist.parallel.pipelines import Pipeline
from minitorch_dist.parallel.pipelines.schedules import gpipe
from minitorch_dist.parallel.tensor import between
from minitorch_dist.parallel.tensor import tensor_parallel as tp

PLAN = {"0": "column", "2": "row"}


def mlp(seed=3):
    mt.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6, dtype=np.float64), nn.Tanh(), nn.Linear(6, 4, dtype=np.float64))


def said(action):
    """The type of its error, and what it says; None where there is none."""
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def other_models():
    """({what differs between the ranks: the error}, whether nothing was cut)."""
    world, whole = comm.world(), []

    def cut(model, plan=PLAN, **options):
        whole.append(model)
        tp.parallelize_module(model, world, plan, **options)

    def frozen():
        model = mlp()
        model[1 + world.rank].requires_grad_(False)
        return model

    def moved():
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm(6), nn.Linear(6, 4))
        model[1].running_mean[2] = world.rank
        return model
    found = {"seed": said(lambda: cut(mlp(world.rank))),
             "last bit": said(lambda: cut(nudged(mlp(), world.rank))),
             "plan": said(lambda: cut(mlp(), {"0": ["column", "column, gathered"][world.rank], "2": "row"})),
             "pattern": said(lambda: cut(mlp(), {["0", "7"][world.rank]: "column"})),
             "option": said(lambda: cut(mlp(), sequence_parallel=[True, "regather"][world.rank])),
             "frozen": said(lambda: cut(frozen())), "size": said(lambda: cut(nn.Linear(4, 4 + world.rank), {})),
             "buffer": said(lambda: cut(moved()))}
    return found, not any(isinstance(m, tp._Part) for model in whole for m in model.modules())


def nudged(model, times):
    with mt.no_grad():
        for _ in range(times):
            model[2].bias[1] = np.nextafter(model[2].bias.numpy()[1], 9)
    return model


def one_after_the_other():
    """Whether what was cut in two calls, over the same ranks and over others, and what has 4 bits, is taken."""
    mesh = comm.DeviceMesh(ep=2, tp=2)
    twice = tp.parallelize_module(mlp(), comm.world(), {"0": "column, gathered"})
    tp.parallelize_module(twice, comm.world(), {"2": "row"})
    mt.manual_seed(4)
    mixed = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.MoE(4, 2, 2))
    tp.parallelize_module(mixed, mesh["ep"], {"3": "experts"})
    mixed[1].requires_grad_(False)
    tp.parallelize_module(mixed, mesh["tp"], PLAN)
    again = tp.parallelize_module(nn.Sequential(nn.MoE(4, 2, 4), nn.Linear(4, 4)), comm.world(), {"0": "experts"})
    tp.parallelize_module(again, comm.world(), {"1": "column"})
    return [type(m).__name__ for m in (twice[0], twice[2], mixed[0], mixed[2], again[1])]


def meshes():
    """{who was given a DeviceMesh: the error}, and whether one has a rank."""
    mesh, net = comm.DeviceMesh(dp=1, tp=1), nn.Sequential(nn.Linear(4, 3))
    return {"data parallel": said(lambda: DistributedDataParallel(net, mesh)),
            "ZeRO": said(lambda: fully_shard(net, mesh)),
            "matrices": said(lambda: tp.parallelize_module(net, mesh, {"0": "column"})),
            "sequences": said(lambda: context_parallel(nn.TransformerBlock(4, 2), mesh)),
            "stages": said(lambda: Pipeline([net], mesh, gpipe(1, 2))),
            "others": said(lambda: scatter_to(np.ones((2, 4)), mesh))}, hasattr(mesh, "rank")


class OneHead(nn.Module):
    """Attention whose result has as many positions as its input."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8, dtype=np.float64) for _ in range(4))

    def forward(self, x):
        y = mt.softmax(self.q(x) @ mt.transpose(self.k(x), (0, 2, 1))) @ self.v(x)
        return self.out(y.reshape(*x.shape[:2], -1))


def given_to_rows():
    """{what a row is given: the error}."""
    world, plan = comm.world(), {**dict.fromkeys("qkv", "column"), "out": "row"}
    row = tp.parallelize_module(mlp(), world, {"2": "row"})
    own = tp.parallelize_module(nn.Sequential(OneHead()), world, {f"0.{name}": way for name, way in plan.items()}, True)
    return {"row alone": said(lambda: row(np.ones((3, 4)))), "other": said(lambda: row[2](np.ones((3, 5)))),
            "attention": said(lambda: own(np.ones((2, 3, 8))))}


class Gate(nn.Module):
    """What scales the hidden features, given a way to get at its parameter."""

    def __init__(self, way=lambda p: p):
        super().__init__()
        mt.manual_seed(3)
        self.up, self.down = nn.Linear(4, 6, dtype=np.float64), nn.Linear(6, 4, dtype=np.float64)
        self.temp, self.way = nn.Parameter(np.full(1, 1.5)), way

    def forward(self, x):
        return self.down(mt.tanh(self.up(x) * self.way(self.temp)))


def between_parts():
    """({what stands between: the error}, the gate's gradient in one process and where it goes in by copy_to, how many
    rows still wait to look)."""
    world, plan, x = comm.world(), {"up": "column", "down": "row"}, np.random.default_rng(7).standard_normal((3, 4))

    def normed():
        model = nn.Sequential(nn.Linear(4, 6, dtype=np.float64), nn.LayerNorm(6 // world.size, dtype=np.float64),
                              nn.Linear(6, 4, dtype=np.float64))
        return tp.parallelize_module(model, world, PLAN)
    with mt.no_grad():      # which leaves nothing to look at
        gate = tp.parallelize_module(Gate(), world, plan)
        gate(x)
    whole, summed = Gate(), tp.parallelize_module(Gate(lambda p: copy_to(p, world)), world, plan)
    found = {"a parameter": said(lambda: gate(x)), "a norm": said(lambda: normed()(x))}
    for model in (whole, summed):
        model(x).sum().backward()
    return found, whole.temp.grad.item(), summed.temp.grad.item(), len(between.waiting)


def dropped(kind, sequence_parallel):
    """[output and gradients of the first layer's part, of a model with a dropout between column and row], in one
    process and cut: they draw for the same module at the same step."""
    world, x = comm.world(), np.random.default_rng(7).standard_normal((3, 4, 4))
    mt.manual_seed(3)
    features = 12 if kind == "gated" else 6
    model = nn.Sequential(nn.Linear(4, features, dtype=np.float64), nn.Dropout(0.5), nn.SwiGLU() if kind == "gated" else
                          nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 4, dtype=np.float64))
    twin = copy.deepcopy(model)
    plan = {"0": "column, gated" if kind == "gated" else "column", "4": "row"}
    tp.parallelize_module(twin, world, plan | ({"1": "sequence"} if sequence_parallel else {}), sequence_parallel)
    found = []
    for m in (model, twin):
        with mt.backend.random_scope(0, 1, 3, (0, 3)):
            part = scatter_to(x, world, 1) if sequence_parallel and m is twin else x
            y = m(part)
        (y * y).sum().backward()
        y = gather_from(y, world, 1) if sequence_parallel and m is twin else y
        found.append((y.numpy(), whole_gradient(m[0])))
    return found


def whole_gradient(layer):
    """A layer's weight's, put together of all ranks' parts."""
    grad = layer.weight.grad.numpy()
    if not isinstance(layer, tp._Part):
        return grad
    whole = np.empty((layer.parts["weight"][2], grad.shape[1]))
    for rows, values in layer.comm.all_gather_object((layer.parts["weight"][1], grad)):
        whole[rows] = values
    return whole


def in_two_places():
    """The error for a dropout that stands between, and elsewhere."""
    drop = nn.Dropout(0.1)
    return said(lambda: tp.parallelize_module(nn.Sequential(nn.Linear(4, 6), drop, nn.Linear(6, 4), drop), comm.world(),
                                              PLAN))
