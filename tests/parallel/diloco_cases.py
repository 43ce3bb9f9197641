"""What the ranks do in test_diloco."""

import contextlib

import numpy as np

import minitorch_dist as mt
from minitorch_dist import checkpoints, comm, ledger, nn, optim
from minitorch_dist.compress import prune
from minitorch_dist.parallel import DistributedDataParallel, full_state_dict, fully_shard
from minitorch_dist.parallel.encodings import E3M0, Sketch
from minitorch_dist.parallel.local_sgd import DiLoCo
from minitorch_dist.parallel.tensor import parallelize_module, tensor_parallel

from . import cases, plain

LR, DECAY = 0.02, 0.1
ENCODINGS = {None: None, "4 bits": E3M0(), "whole": Sketch()}


def rows_of(worker, step):
    """A worker's batch: 3 to 6 of the samples."""
    random = np.random.default_rng([5, worker, step])
    return random.integers(0, plain.SAMPLES, 3 + (2 * worker + step) % 4)


def adamw(model, lr=LR):
    return optim.AdamW(model.parameters(), lr=lr, weight_decay=DECAY)


def plain_sgd(params):
    return optim.SGD(params, lr=1.0)


def backward(model, rows, dp=None, scale=None, spoil=False):
    """The mean over the worker's rows, of which this rank has its share."""
    x, labels = plain.dataset()
    mine = rows if dp is None else rows[len(rows) * dp.rank // dp.size:len(rows) * (dp.rank + 1) // dp.size]
    loss = nn.cross_entropy(model(x[mine]), labels[mine], reduction="sum") / len(rows)
    loss = loss if scale is None else scale(loss)
    (loss * np.inf if spoil else loss).backward()


def fit(diloco, steps, worker, dp=None, clip=None, scaler=None, spoilt=()):
    """These steps; of those in `spoilt`, (worker, step), the gradients are inf."""
    for step in steps:
        rows = rows_of(worker, step)
        diloco.zero_grad()
        with np.errstate(invalid="ignore"):
            backward(diloco.model, rows, dp, scaler and scaler.scale, (worker, step) in spoilt)
            if scaler is not None:
                scaler.unscale_(diloco.inner)
            if clip is not None and not (scaler and scaler.found_inf(diloco.inner)):
                optim.clip_grad_norm_(diloco.model.parameters(), clip)
            diloco.step(len(rows), scaler)
        if scaler is not None:
            scaler.update()


def whole(model):
    """[its parameters' values], whole, on rank 0 of a worker."""
    if any(getattr(type(m), "is_part", False) for m in model.modules()):
        return list(tensor_parallel.full_state_dict(model).values())
    return list((full_state_dict(model) if hasattr(model, "units") else model.state_dict()).values())


def both(diloco):
    """(this worker's values, the common ones)."""
    own = whole(diloco.model)
    with diloco.common():
        return own, whole(diloco.model)


def build(inside=None, dp=None, exact=False):
    """The model as a worker has it."""
    model = cases.small_model()
    options = {"exact": True, "micro_shards": 4} if exact else {}
    if inside == "tp":
        return parallelize_module(model, dp, {"0": "column", "2": "row"})
    if inside == "ddp":
        return DistributedDataParallel(model, dp, **options)
    return model if inside is None else fully_shard(model, dp, stage=inside, **options)


def runs(settings):
    """{name: (own values, common values) after `steps`} for {name: (settings, steps, whether to finish)}."""
    world, found = comm.world(), {}
    for name, (options, steps, finish) in settings.items():
        model = build()
        diloco = DiLoCo(model, adamw(model), world, **options)
        fit(diloco, range(1, steps + 1), world.rank)
        if finish:
            diloco.finish()
        found[name] = both(diloco)
    return found


def as_data_parallel(steps):
    """SGD inside and out, meeting after every step; from rank 0's values."""
    model = build()
    model.load_state_dict({name: value + comm.world().rank for name, value in model.state_dict().items()})
    diloco = DiLoCo(model, optim.SGD(model.parameters(), lr=0.3), every=1, outer=plain_sgd)
    fit(diloco, range(1, steps + 1), comm.world().rank)
    return both(diloco)


def with_ranks_inside(inside, settings, steps, options):
    """(own values, common values) of a worker whose two ranks share its batch, and what the common values had made of
    the samples after four steps; options: of fit."""
    mesh = comm.DeviceMesh(workers=2, dp=-1)
    model = build(inside, mesh["dp"])
    diloco = DiLoCo(model, adamw(model), mesh["workers"], **settings)
    scaler = optim.GradScaler(init_scale=2.0 ** 10) if options.get("spoilt") else None
    dp = None if inside == "tp" else mesh["dp"]     # tensor parallel ranks have all rows
    fit(diloco, range(1, 5), mesh.coords["workers"], dp, scaler=scaler, **options)
    with mt.no_grad():
        model(plain.dataset()[0])       # by its own values, which stages 1 and 2 gather
        with diloco.common():
            outputs = model(plain.dataset()[0]).numpy().copy()
    fit(diloco, range(5, steps + 1), mesh.coords["workers"], dp, scaler=scaler, **options)
    return *both(diloco), outputs


def in_exact_mode(inside, steps):
    """Digests of the common values: micro-shards of one row each, workers of one rank or two."""
    mesh = comm.DeviceMesh(workers=2, dp=-1)
    model, (x, labels) = build(inside, mesh["dp"], exact=True), plain.dataset()
    diloco = DiLoCo(model, adamw(model), mesh["workers"], every=2, exact=True)
    each = 4 // mesh["dp"].size
    for step in range(steps):
        rows = np.random.default_rng([6, mesh.coords["workers"], step]).integers(0, plain.SAMPLES, 4)
        diloco.zero_grad()
        for row in rows[mesh.coords["dp"] * each:(mesh.coords["dp"] + 1) * each]:
            (nn.cross_entropy(model(x[[row]]), labels[[row]], reduction="sum") / 4).backward()
        diloco.step(4)
    return [value.tobytes() for value in both(diloco)[1]]


def on_its_way():
    """(own values, the common ones) when all is sent and nothing taken; its samples; the common ones after that."""
    world, model = comm.world().split(0), build()
    world.algorithm = "ring"        # which would add up in another order
    diloco = DiLoCo(model, adamw(model), world, every=3, overlap=1, outer=plain_sgd, exact=True)
    fit(diloco, range(1, 4), world.rank)
    own, before = both(diloco)
    fit(diloco, range(4, 5), world.rank)
    found = own, before, sum(len(rows_of(world.rank, step)) for step in range(1, 4)), both(diloco)[1]
    world.free()
    return found


def rounded_alike():
    """How many magnitudes the outer gradient of each matrix has, where all workers have the same difference to send."""
    model = build()
    before = whole(model)
    diloco = DiLoCo(model, optim.SGD(model.parameters(), lr=0.3), every=2, outer=plain_sgd, encoding=E3M0())
    fit(diloco, range(1, 3), 0)
    return [len(np.unique(np.abs(a - b).round(12))) for a, b in zip(before, whole(model), strict=True) if a.ndim == 2]


class Quadratic(nn.Module):
    """½ Σ a (w - c)²."""

    def __init__(self, a, c, start):
        super().__init__()
        self.a, self.c, self.w = a, c, mt.tensor(start, requires_grad=True)

    def forward(self):
        return ((self.w - self.c) ** 2 * self.a).sum() * 0.5


def quadratics(a, c, start, samples, lr, every, rounds):
    """The common values after each round."""
    rank, found = comm.world().rank, []
    model = Quadratic(a[rank], c[rank], start)
    diloco = DiLoCo(model, optim.SGD(model.parameters(), lr=lr), every=every, outer=plain_sgd)
    for _ in range(rounds):
        for _ in range(every):
            diloco.zero_grad()
            model().backward()
            diloco.step(samples[rank])
        found.append(model.w.numpy().copy())
    return found


def traffic(encoding, fragments, overlap):
    """[(calls, bytes) of each of two rounds' steps], and [bytes of kind "optimizer"] at the end."""
    world = comm.world()
    mt.manual_seed(3)
    model = nn.Sequential(nn.Linear(70, 90), nn.Tanh(), nn.Linear(90, 13))
    diloco = DiLoCo(model, adamw(model), world, every=4, fragments=fragments, overlap=overlap,
                    encoding=ENCODINGS[encoding])
    seen = []
    with ledger.record(memory=True) as memory:
        for step in range(1, 9):
            diloco.zero_grad()
            (model(mt.tensor(np.random.default_rng([world.rank, step]).standard_normal((5, 70)).astype("f4"))) ** 2
             ).mean().backward()
            with ledger.record() as book:
                diloco.step(5)
            seen.append((dict(book.calls), dict(book.bytes_sent), book.events))
    return seen, memory.live["optimizer"]


def resumed(folder, at, settings, kinds, inner="AdamW"):
    """(own and common values after 9 steps: of a run that saves after step `at`, of one that doesn't, of one that goes
    on from there, of one that is given the state by itself), the common values then, those that a model alone loads,
    which fragments were on their way. kinds: how a worker is cut when it saves, and when it goes on."""
    world = comm.world()
    mesh = comm.DeviceMesh(workers=2, dp=-1)

    def new(inside):
        model = build(inside, mesh["dp"])
        return DiLoCo(model, getattr(optim, inner)(model.parameters(), lr=LR, weight_decay=DECAY), mesh["workers"],
                      **settings)

    def go(diloco, first, last):
        fit(diloco, range(first, last + 1), mesh.coords["workers"], mesh["dp"])
    first, second, third = new(kinds[0]), new(kinds[0]), new(kinds[1])
    go(first, 1, at)
    state = first.state_dict()
    on_the_way = [f.pending for f in first.fragments]
    store = checkpoints.Checkpoints(folder, world)
    with first.common():
        store.save(at, first.model, first)
        common = whole(first.model)
    go(first, at + 1, 9)
    go(second, 1, 9)
    go(third, 1, 3)     # what it has done and sent counts for nothing
    store.load(third.model, third)
    loaded = cases.small_model()
    checkpoints.load(store.path(at), loaded, comm=world)
    go(third, at + 1, 9)
    fourth = new(kinds[0])
    go(fourth, 1, at - 1)
    fourth.load_state_dict(state)
    go(fourth, at + 1, 9)
    return [both(run) for run in (first, second, third, fourth)], common, whole(loaded), on_the_way


def refused_at_load(folder):
    """What a run of other settings says to a checkpoint, and one of another number of workers."""
    world, said = comm.world(), []
    store = checkpoints.Checkpoints(folder, world)

    def new(group=world, **settings):
        model = build()
        return DiLoCo(model, adamw(model), group, **{"every": 3} | settings)
    diloco = new()
    fit(diloco, range(1, 3), world.rank)
    try:
        store.save(2, diloco.model, diloco)
    except ValueError as error:
        said.append(str(error))
    with diloco.common():
        store.save(2, diloco.model, diloco)
    for other in (new(every=4), new(world.split(world.rank))):
        try:
            store.load(other.model, other)
        except ValueError as error:
            said.append(str(error))
    for act in (lambda: store.load(diloco.model, diloco), lambda: diloco.step(1), lambda: diloco.common().__enter__()):
        with diloco.common():
            try:
                act()
            except RuntimeError as error:
                said.append(str(error))
    return said


def diverged(encoding, overlap):
    """What all ranks are told when worker 1 has inf, and whether common values are as they were."""
    rank, model = comm.world().rank, build()
    diloco = DiLoCo(model, adamw(model), every=2, overlap=overlap, encoding=ENCODINGS[encoding])
    fit(diloco, range(1, 5), rank)
    if overlap:
        diloco.finish()
    before = both(diloco)[1]
    told = None
    try:
        fit(diloco, range(5, 8), rank, spoilt=[(1, 5)])
    except ValueError as error:
        told = str(error)
    after = both(diloco)[1]
    return told, diloco.steps, all((a == b).all() for a, b in zip(before, after, strict=True))


def told_inside(inside, workers, wrong, encoding=None):
    """What this rank is told when the last one but one has, by itself, inf in its gradients ("inf") or counts another
    sample ("count"); and whether the common values are as they were."""
    world = comm.world()
    mesh = comm.DeviceMesh(workers=workers, dp=-1) if inside != "tp in ddp" else comm.DeviceMesh(workers=1, dp=2, tp=-1)
    odd = world.rank == world.size - 2      # of a small fully_shard unit the last rank has nothing
    model = DistributedDataParallel(build("tp", mesh["tp"]), mesh["dp"]) if inside == "tp in ddp" else build(
        inside, mesh["dp"])
    diloco = DiLoCo(model, optim.SGD(model.parameters(), lr=0.1), mesh["workers"], every=2, fragments=2,
                    encoding=ENCODINGS[encoding])
    before = [f.flat.params.copy() for f in diloco.fragments]
    backward(model, rows_of(0, 1))
    for p in model.parameters() if odd and wrong == "inf" else ():
        p.grad.data[...] = np.inf       # of what this rank has
    told = None
    try:
        diloco.step(3 + (odd and wrong == "count"))
    except ValueError as error:
        told = str(error)
    return told, all((f.flat.params == b).all() for f, b in zip(diloco.fragments, before, strict=True))


def pruned(inside, settings):
    """[(which of the common values aren't 0, how they are masked)] after each of 7 steps, and at the end."""
    mesh = comm.DeviceMesh(workers=2, dp=-1)
    mt.manual_seed(3)
    model = nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 5))
    pruning = prune.Pruning(model, prune.magnitude(model, 0.5))
    if inside is not None:
        masks, model = pruning.masks, fully_shard(model, mesh["dp"], stage=inside)
        pruning = prune.Pruning(model, masks)
    diloco, seen = DiLoCo(model, adamw(model), mesh["workers"], **settings), []

    def look():
        with diloco.common():
            state = full_state_dict(model) if inside is not None else model.state_dict()
            seen.extend((state[name] != 0, mask) for name, mask in pruning.masks.items() if state)
    x = np.random.default_rng(comm.world().rank).standard_normal((7, 3, 7)).astype("f4")
    for batch in x:
        diloco.zero_grad()
        (model(mt.tensor(batch)) ** 2).mean().backward()
        diloco.step(3, after=pruning.apply)
        look()
    diloco.finish()
    look()
    return seen


def back_after_divergence(folder):
    """Whether a run whose worker has sent inf goes on from a checkpoint of before, and is told of one of after."""
    world = comm.world()
    model, store = build(), checkpoints.Checkpoints(folder, world)
    diloco = DiLoCo(model, adamw(model), every=2, overlap=1)

    def save(at):
        with diloco.common():
            store.save(at, model, diloco)
    fit(diloco, range(1, 4), world.rank)
    save(3)
    fit(diloco, range(4, 5), world.rank, spoilt=[(1, 4)])
    save(4)
    store.load(model, diloco, 3)
    fit(diloco, range(4, 6), world.rank)
    fine = both(diloco)
    store.load(model, diloco, 4)
    try:
        fit(diloco, range(5, 6), world.rank)
    except ValueError as error:
        return fine, str(error)


def without_samples():
    """What is said where no worker tells of samples; and weights where one doesn't."""
    world, model = comm.world(), build()
    diloco = DiLoCo(model, adamw(model), every=1, outer=plain_sgd)
    try:
        diloco.step(0)
        said = None
    except ValueError as error:
        said = str(error)
    with contextlib.suppress(ValueError):
        diloco.step(np.nan)
        said = None
    backward(model, rows_of(0, 1))
    diloco.inner.step()
    alone = whole(model)
    diloco.zero_grad()
    diloco.step(3 if world.rank == 0 else 0)
    return said, alone, both(diloco)[1]


def disagreeing():
    """{what the last rank has otherwise: what this one is told}."""
    world, said = comm.world(), {}
    mesh = comm.DeviceMesh(workers=2, dp=-1)
    ways = {"every=3": {"every": 3}, "fragments=2": {"fragments": 2}, "mix=0.5": {"mix": 0.5},
            "overlap=1": {"overlap": 1}, "encoding": {"encoding": E3M0()}, "'lr': 1.0": {"outer": plain_sgd},
            "'lr': 0.5": {"lr": 0.5}}
    if world.size == 2:     # else the worker's own wrapper finds it
        ways["parameter 'extra'"] = {"extra": True}
    for name, way in ways.items():
        options = {"every": 2} | (way if world.rank == world.size - 1 else {})
        model = build()
        if options.pop("extra", False):
            model.extra = mt.tensor(np.zeros(2), requires_grad=True)
        model = DistributedDataParallel(model, mesh["dp"])
        try:
            DiLoCo(model, adamw(model, options.pop("lr", LR)), mesh["workers"], **options)
            said[name] = "nothing"
        except ValueError as error:
            said[name] = str(error)
    return said


def disagreeing_inside():
    """As all second ranks of the workers mean another H than the first ones."""
    mesh = comm.DeviceMesh(workers=2, dp=2)
    model = DistributedDataParallel(build(), mesh["dp"])
    try:
        DiLoCo(model, adamw(model), mesh["workers"], every=2 + mesh.coords["dp"])
    except ValueError as error:
        return str(error)


def out_of_step():
    """A worker that has made one step less is elsewhere when the others meet."""
    world, model = comm.world(), build()
    diloco = DiLoCo(model, adamw(model), every=2)
    try:
        fit(diloco, range(1, 3 - world.rank), world.rank)
        world.all_reduce(np.zeros(3))
    except comm.MismatchError as error:
        return str(error)


def wrapped_wrongly():
    """{what is wrong: what is said} for a model over ranks that are workers."""
    world, said = comm.world(), {}

    def told(name, make):
        try:
            make()
            said[name] = None
        except ValueError as error:
            said[name] = str(error)
    over_all = DistributedDataParallel(build(), world)
    told("over workers", lambda: DiLoCo(over_all, adamw(over_all), every=2))
    alone = DistributedDataParallel(build(), world.split(world.rank))
    told("alone", lambda: DiLoCo(alone, adamw(alone), every=2))
    model, other = build(), build()
    told("another's", lambda: DiLoCo(model, adamw(other), every=2))
    told("too few", lambda: DiLoCo(model, optim.SGD([model[0].weight]), every=2))
    norm = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm(4))
    told("BatchNorm", lambda: DiLoCo(norm, adamw(norm), every=2))
    mixed = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, dtype=np.float64))
    told("dtypes", lambda: DiLoCo(mixed, adamw(mixed), every=2))
    return said
