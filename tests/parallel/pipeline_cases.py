"""What the ranks do in the tests of pipelines. What must hold is checked by the parent process."""

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, data, ledger, nn, optim, training
from minitorch_dist.parallel import DistributedDataParallel
from minitorch_dist.parallel.pipelines import Pipeline, cut_sequential
from minitorch_dist.parallel.pipelines.schedules import (
    NAMES,
    Step,
    gpipe,
    interleaved,
    one_forward_one_backward,
    placement_of,
    schedule_of,
    zb_h1,
)

from . import plain
from .cases import digest

WIDTHS, SEED, STEPS = (plain.FEATURES, 9, 11, 7, plain.CLASSES), 3, 12


def model(dtype, norms=False):
    mt.manual_seed(5)
    layers = []
    for inside, out in zip(WIDTHS, WIDTHS[1:], strict=False):
        norm = nn.BatchNorm(out, dtype=dtype) if norms else nn.Tanh()
        layers += [nn.Linear(inside, out, dtype=dtype), norm, nn.Dropout(0.2)]
    return nn.Sequential(*layers[:-2])


def loss_of(output, labels):
    return nn.cross_entropy(output, labels, reduction="sum")


def loader_for(dtype, batch, rank, size, exact, drop_last=False):
    x, labels = plain.dataset()
    return data.Loader(x.astype(dtype), labels, batch, seed=2, rank=rank, size=size, micro_shards=8 if exact else 1,
                       drop_last=drop_last)


def state(module):
    """{name: parameter or buffer}, copied."""
    return {name: np.array(value) for name, value in module.state_dict().items()}


def whole(dtype, batch, exact, norms=False):
    """(losses, parameters, digest) of one process, by train_step."""
    world = comm.world()
    replica = DistributedDataParallel(model(dtype, norms), world, exact=exact)
    optimizer = optim.Adam(replica.parameters(), lr=0.01)
    loader, losses = loader_for(dtype, batch, 0, 1, exact, norms), []
    for step, one in zip(range(STEPS), (b for epoch in range(STEPS) for b in loader.epoch(epoch)), strict=False):
        losses.append(training.train_step(replica, optimizer, one, lambda m, s: loss_of(m(s.inputs), s.labels), world,
                                          seed=SEED, step=step)[0])
    return losses, state(replica), digest(replica)


def wholes():
    return {"f8": whole("f8", 13, False), "f4": whole("f4", 16, True), "norms": whole("f8", 16, True, norms=True)}


def parts_for(whole, schedule, rank):
    """The stages of a model that a rank has by a schedule."""
    placement = placement_of(schedule)
    stages = cut_sequential(whole, sum(map(len, placement)))
    return [stages[stage] for stage in placement[rank]]


def train(name, pp, micro_batches, chunks, dtype, batch, exact, wrapped=True, norms=False):
    """(losses, this rank's parameters and buffers, micro-batches (live, waiting for W), coords) of a mesh with `pp`
    ranks along the pipeline."""
    mesh = comm.DeviceMesh(dp=-1, pp=pp)
    schedule = schedule_of(name, pp, micro_batches, chunks)
    stages = parts_for(model(dtype, norms), schedule, mesh.coords["pp"])
    if wrapped:
        stages = [DistributedDataParallel(stage, mesh["dp"], exact=exact,
                                          micro_shards=8 if exact else 8) for stage in stages]
    params = [p for stage in stages for p in stage.parameters()]
    optimizer = optim.Adam(params, lr=0.01) if params else None
    pipeline = Pipeline(stages, mesh["pp"], schedule)
    loader, losses = loader_for(dtype, batch, mesh.coords["dp"], mesh["dp"].size, exact, norms), []
    for step, one in zip(range(STEPS), (b for epoch in range(STEPS) for b in loader.epoch(epoch)), strict=False):
        for stage in stages:
            stage.zero_grad()
        losses.append(pipeline.run(one, loss_of, seed=SEED, step=step, over=mesh["dp"]))
        if params:
            optimizer.step()
    return losses, {name: value for stage in stages for name, value in state(stage).items()}, \
        (pipeline.live, pipeline.waiting), mesh.coords


class Sometimes(nn.Module):
    """Uses its weight in its first calls only."""

    def __init__(self, calls):
        super().__init__()
        self.weight, self.calls = nn.Parameter(np.ones(plain.FEATURES)), calls

    def forward(self, x):
        self.calls -= 1
        return x * self.weight if self.calls >= 0 else x if isinstance(x, mt.Tensor) else mt.tensor(x)


def sometimes(name, calls, place, exact):
    """This rank's gradients of a pipeline of two, beside data parallelism, of whose stages one (place) uses its
    parameter for the first `calls` micro-batches of four; and which stage it is."""
    mesh = comm.DeviceMesh(dp=-1, pp=2)
    mt.manual_seed(1)
    stages = [nn.Sequential(Sometimes(calls)),
              nn.Sequential(nn.Linear(plain.FEATURES, plain.FEATURES, dtype=np.float64))][::1 - 2 * place]
    stage = DistributedDataParallel(stages[mesh.coords["pp"]], mesh["dp"], exact=exact)
    batch = next(iter(loader_for(np.float64, 16, mesh.coords["dp"], mesh["dp"].size, exact).epoch(0)))
    Pipeline([stage], mesh["pp"], schedule_of(name, 2, 4)).run(batch, loss_of, seed=1, step=0, over=mesh["dp"])
    return mesh.coords["pp"], [None if p.grad is None else p.grad.numpy().copy() for p in stage.parameters()]


def other_order():
    """The largest difference of a gradient from the one of the whole, where the second rank takes micro-batches in
    another order than the first one sends them."""
    world = comm.world()
    mt.manual_seed(5)
    whole = model(np.float64)
    batch = next(iter(loader_for(np.float64, 8, 0, 1, False).epoch(0)))
    rows = [[Step("F", 0, 0), Step("F", 1, 0), Step("B", 1, 0), Step("B", 0, 0)],
            [Step("F", 1, 1), Step("B", 1, 1), Step("F", 0, 1), Step("B", 0, 1)]]
    stage = cut_sequential(model(np.float64), 2)[world.rank]
    Pipeline([stage], world, rows).run(batch, loss_of, seed=1, step=0)
    Pipeline([whole], world.split(world.rank), one_forward_one_backward(1, 2)).run(batch, loss_of, seed=1, step=0)
    wanted = dict(whole.named_parameters())
    return max(abs(p.grad.numpy() - wanted[name].grad.numpy()).max() for name, p in stage.named_parameters())


def bare_ends():
    """The gradients of a Linear between two activations, each on a rank of its own, and those of the whole."""
    world = comm.world()
    mt.manual_seed(1)
    whole = nn.Sequential(nn.Tanh(), nn.Linear(plain.FEATURES, plain.CLASSES, dtype=np.float64), nn.Tanh())
    batch = next(iter(loader_for(np.float64, 9, 0, 1, False).epoch(0)))
    loss = loss_of(whole(batch.inputs), batch.labels) * (1 / 9)
    loss.backward()
    wanted = {name: p.grad.numpy().copy() for name, p in whole.named_parameters()}
    whole.zero_grad()
    stage = cut_sequential(whole, 3)[world.rank]
    got = Pipeline([stage], world, one_forward_one_backward(3, 2)).run(batch, loss_of, seed=0, step=0)
    return got - loss.item(), wanted, {name: p.grad.numpy() for name, p in stage.named_parameters()}


def counted(name, chunks, frozen=0):
    """{op: (calls, bytes)} of a step along pp, the second one, what goes forward over each boundary of stages, and
    whether the gradients are those of one process. frozen: so many of the lowest stages are."""
    world = comm.world()
    whole = model(np.float64)
    schedule = schedule_of(name, world.size, 4, chunks)
    stages = cut_sequential(whole, world.size * chunks)
    for stage in stages[:frozen]:
        stage.requires_grad_(False)
    pipeline = Pipeline(parts_for(whole, schedule, world.rank), world, schedule)
    batch = next(iter(loader_for(np.float64, 13, 0, 1, False).epoch(0)))
    pipeline.run(batch, loss_of, seed=SEED, step=0)
    with ledger.record() as book:
        pipeline.run(batch, loss_of, seed=SEED, step=1)
    found = [p.grad for part in pipeline.chunks for p in part.parameters()]
    whole.zero_grad()
    for step in 0, 1:
        with mt.backend.random_scope(SEED, step, batch.count, batch.shards[0].rows, 8):
            loss = loss_of(whole(batch.inputs), batch.labels) * (1 / batch.count)
        if loss.requires_grad:
            loss.backward()
    wanted = [p.grad for part in pipeline.chunks for p in part.parameters()]
    same = all(a is b is None or np.allclose(a.numpy(), b.numpy(), 1e-10, 1e-12)
               for a, b in zip(found, wanted, strict=True))
    widths, x = [], batch.inputs
    for stage in stages[:-1]:
        x = stage(x)
        widths.append(x.shape[1])
    return {op: (book.calls[axis, op], book.bytes_sent[axis, op]) for axis, op in book.calls}, widths, same


class Cumulated(nn.Module):
    """The shape of its input, of two axes beside the samples; another result for another shape."""

    def forward(self, x):
        return mt.cumsum(mt.tanh(x), 1)


def other_shapes(name):
    """[(loss, of the whole)] of one Pipeline and batches whose samples have other shapes: of as many bytes, of more."""
    world, found = comm.world(), []
    schedule = schedule_of(name, world.size, 2, 2)
    whole = nn.Sequential(*[Cumulated() for _ in range(sum(map(len, placement_of(schedule))))])
    pipeline = Pipeline(parts_for(whole, schedule, world.rank), world, schedule)
    for shape in ((2, 3), (3, 2), (2, 3), (5, 3)):
        x = np.random.default_rng(1).standard_normal((4, *shape))
        batch = next(iter(data.Loader(x, np.zeros(4, int), 4, seed=2).epoch(0)))
        found.append((pipeline.run(batch, lambda y, labels: mt.sum(y * y), seed=0, step=0),
                      mt.sum(whole(mt.tensor(x)) ** 2).item() / 4))
    return found


class Tied(nn.Module):
    """One weight, used twice: as it is and transposed."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(np.random.default_rng(6).standard_normal((9, 5)))

    def forward(self, x):
        return mt.matmul(mt.tanh(mt.matmul(x, mt.transpose(self.weight))), self.weight)


class Checkpointed(nn.Sequential):
    """Keeps its input alone; counts how often it runs."""

    runs = 0

    def forward(self, x):
        def run(x):
            self.runs += 1
            return nn.Sequential.forward(self, x)
        return mt.checkpoint(run)(x)


def special():
    """A model of two stages that have a tied weight and a checkpointed part with dropout."""
    mt.manual_seed(4)
    layers = [nn.Linear(plain.FEATURES, 5, dtype=np.float64), Tied(),
              Checkpointed(nn.Linear(5, 6, dtype=np.float64), nn.Dropout(0.3), nn.Tanh(), nn.Linear(6, 5, dtype="f8")),
              nn.LayerNorm(5, dtype=np.float64), Tied(), nn.Linear(5, plain.CLASSES, dtype=np.float64)]
    return nn.Sequential(*layers)


def both(micro_batches, wrapped):
    """Of a step by 1F1B and by ZB-H1, of `special` on two stages, by name: (loss, {name: gradient}, products of
    matrices, runs of checkpointed parts, the steps that timelines show, peak and live bytes of activations, how often
    the gradients were reduced, whether this began after the last step but one was through). The samples are divided
    if `wrapped`."""
    mesh, found = comm.DeviceMesh(dp=-1, pp=2), {}
    for name in ("1f1b", "zb-h1"):
        whole = special()
        stage = nn.Sequential()
        for place, layer in list(whole._modules.items())[3 * mesh.coords["pp"]:][:3]:
            stage.add_module(place, layer)
        module = DistributedDataParallel(stage, mesh["dp"]) if wrapped else stage
        pipeline = Pipeline([module], mesh["pp"], schedule_of(name, 2, micro_batches))
        batch = next(iter(loader_for(np.float64, 26, mesh.coords["dp"], mesh["dp"].size, False).epoch(0)))
        products, product = [], np.matmul
        np.matmul = lambda *args, **options: products.append(1) or product(*args, **options)  # noqa: B023
        try:
            with ledger.record(memory=True, timeline=True) as book:
                loss = pipeline.run(batch, loss_of, seed=SEED, step=0, over=mesh["dp"])
        finally:
            np.matmul = product
        del batch       # its inputs and labels are kept for backward too
        passes = [s for s in book.spans if s.name in NAMES.values()]
        reductions = [s for s in book.spans if s.name == "all_reduce" and "bucket" in s.detail]
        found[name] = (loss, {key: p.grad.numpy().copy() for key, p in module.named_parameters()}, len(products),
                       sum(m.runs for m in module.modules() if isinstance(m, Checkpointed)),
                       [s.name for s in passes], book.peak["activation"], book.live["activation"], len(reductions),
                       all(s.begin >= passes[-2].end for s in reductions))
    return found


def frozen_norm(how, exact=False):
    """(running mean and variance of a BatchNorm in a first stage that is frozen, or what is said; those of NumPy) after
    a batch; how: what becomes of that stage."""
    mesh = comm.DeviceMesh(pp=2, dp=2)
    dp, rank, micro = mesh["dp"], mesh["pp"].rank, 4 if exact else 2
    stages = cut_sequential(model(np.float64, True), 2, [1] * (3 * len(WIDTHS) - 5))
    norm, linear = stages[0]._modules["1"], stages[0]._modules["0"]
    stages[0].requires_grad_(False)
    if how == "eval":
        stages[0].eval()
    wrapped = rank or how == "wrapped"
    mine = DistributedDataParallel(stages[rank], dp, exact=exact) if wrapped else stages[0]
    batch, whole = (next(iter(loader_for(np.float64, 16, r, size, exact).epoch(0))) for r, size in
                    ((dp.rank, dp.size), (0, 1)))
    try:
        Pipeline([mine], mesh["pp"], gpipe(2, micro)).run(batch, loss_of, seed=SEED, step=0, over=dp)
    except Exception as error:
        return (str(error), None) if rank == 0 else None
    mean, var = np.zeros(WIDTHS[1]), np.ones(WIDTHS[1])
    for rows in [*range(4), *range(8, 12)], [*range(4, 8), *range(12, 16)]:     # of both ranks' micro-batches
        y = whole.inputs[rows] @ linear.weight.numpy().T + linear.bias.numpy()
        mean, var = 0.9 * mean + 0.1 * y.mean(0), 0.9 * var + 0.1 * y.var(0, ddof=1)
    return ((norm.running_mean, norm.running_var), (mean, var)) if rank == 0 else None


def errors():
    """{what is wrong: (type, message)}."""
    world, found = comm.world(), {}
    batch = next(iter(loader_for(np.float64, 8, 0, 1, False).epoch(0)))

    def attempt(name, action):
        try:
            action()
            found[name] = None
        except Exception as error:
            found[name] = type(error).__name__, str(error)
    stages = cut_sequential(model(np.float64), 2)
    mine = stages[world.rank:world.rank + 1]
    attempt("ranks", lambda: Pipeline(mine, world, gpipe(3, 4)))
    attempt("chunks", lambda: Pipeline(mine, world, interleaved(2, 4, 2)))
    attempt("count", lambda: Pipeline(mine * (1 + world.rank), world, gpipe(2, 4)))
    attempt("deadlock", lambda: Pipeline(mine, world, [[Step("F", 0, 0), Step("B", 0, 0)],
                                                             [Step("B", 0, 1), Step("F", 0, 1)]]))
    late = [[Step("F", 0, s), Step("W", 0, s), Step("I", 0, s)] for s in (0, 1)]
    attempt("W before I", lambda: Pipeline(mine, world, late))
    swapped = [[*row[:-2], row[-1], row[-2]] if rank else row for rank, row in enumerate(zb_h1(2, 8))]
    Pipeline(mine, world, swapped)
    exact_stage = DistributedDataParallel(cut_sequential(model(np.float64), 2)[world.rank], world.split(world.rank),
                                          exact=True)
    attempt("order", lambda: Pipeline([exact_stage] if world.rank else mine, world, swapped))     # one of them suffices
    attempt("few", lambda: cut_sequential(nn.Sequential(nn.Tanh()), 2))
    attempt("kind", lambda: cut_sequential(nn.Linear(2, 2), 1))
    attempt("costs", lambda: cut_sequential(model(np.float64), 2, [1, 2]))
    exact = next(iter(loader_for(np.float64, 8, 0, 1, True).epoch(0)))
    attempt("shards", lambda: Pipeline(mine, world, gpipe(2, 4)).run(exact, loss_of, seed=0, step=0))
    attempt("others", lambda: Pipeline(mine, world, one_forward_one_backward(2, 4 - 2 * world.rank)))
    attempt("other steps", lambda: Pipeline(mine, world, (gpipe, one_forward_one_backward)[world.rank](2, 4)))
    frozen = Pipeline([mine[0].requires_grad_(world.rank == 1)], world.split(0), gpipe(2, 2))
    mine[0].requires_grad_()
    attempt("thawed", lambda: frozen.run(batch, loss_of, seed=0, step=0))
    flat = Pipeline([nn.Sequential(nn.Linear(plain.FEATURES, 3, dtype=np.float64), Flat())], world, gpipe(2, 2))
    if world.rank == 0:
        attempt("samples", lambda: flat.run(batch, loss_of, seed=0, step=0))
    else:
        flat._agree("run", batch, None, False, loss_of)    # and goes no further
    return found


def broken():
    """The error of a run after one that has raised on both ranks, with messages under way."""
    world = comm.world()
    batch, armed = next(iter(loader_for(np.float64, 8, 0, 1, False).epoch(0))), []

    def loss(output, labels):
        if armed:
            raise MemoryError
        return loss_of(output, labels)

    def bomb(module, inputs, output):
        if armed:
            armed.append(1)
            if len(armed) == 4:     # the third micro-batch's forward
                raise MemoryError
    chunk = cut_sequential(model(np.float64), 2)[world.rank]
    if world.rank == 0:
        chunk.register_forward_hook(bomb)
    pipeline, said = Pipeline([chunk], world, gpipe(2, 4)), []
    for arm in (False, True, False):
        armed[:] = [1] * arm
        try:
            pipeline.run(batch, loss, seed=0, step=0)
            said.append("nothing")
        except (MemoryError, RuntimeError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


class Flat(nn.Module):
    def forward(self, x):
        return mt.reshape(x, (-1,))
