"""What the ranks do in the tests of parameters that several stages of a pipeline have."""

from contextlib import nullcontext

import numpy as np

import minitorch_dist as mt
from minitorch_dist import checkpoints, comm, ledger, nn, optim
from minitorch_dist.parallel import DistributedDataParallel, fully_shard
from minitorch_dist.parallel.pipelines import Pipeline, cut_sequential, full_state_dict
from minitorch_dist.parallel.pipelines.schedule_steps import Step
from minitorch_dist.parallel.pipelines.schedules import gpipe, one_forward_one_backward, placement_of, zb_h1, zb_v

from . import plain
from .pipeline_cases import loader_for, loss_of
from .pipeline_zero_cases import Again, tied

SCHEDULES = {"1f1b": lambda: one_forward_one_backward(2, 4), "zb-v": lambda: zb_v(2, 4)}


def batches(count=2):
    return list(loader_for(np.float64, 16, 0, 1, False).epoch(0))[:count]


def summed(name):
    """({parameter of this rank: its gradient} after two batches, that of a process alone, the norm that
    clip_grad_norm_ gives, bytes sent by all-reduces of a batch)."""
    world, schedule = comm.world(), SCHEDULES[name]()
    placement = placement_of(schedule)
    stages = cut_sequential(tied(np.float64), sum(map(len, placement)), [1] * 10)
    mine = [stages[stage] for stage in placement[world.rank]]
    pipeline = Pipeline(mine, world, schedule)
    alone = tied(np.float64)
    one = Pipeline([alone], world.split(world.rank), gpipe(1, 4))
    for step, batch in enumerate(batches()):
        with ledger.record() as book:
            pipeline.run(batch, loss_of, seed=1, step=step)
        one.run(batch, loss_of, seed=1, step=step)
    gradients = {name: p.grad.numpy().copy() for stage in mine for name, p in stage.named_parameters()}
    wanted = {name: p.grad.numpy() for name, p in alone.named_parameters(remove_duplicate=False)}
    return (gradients, wanted, pipeline.clip_grad_norm_(1e9),
            {axis: n for (axis, op), n in book.bytes_sent.items() if op == "all_reduce"})


ADDING = {      # what has the gradients that a second batch is added to
    "optimizer": lambda m: optim.SGD(m.parameters()) and m,     # in a flat buffer
    "DDP": lambda m: DistributedDataParallel(m, comm.world_of_one()),
    "ZeRO 2": lambda m: fully_shard(m, comm.world_of_one(), 2),
    "ZeRO 3": lambda m: fully_shard(m, comm.world_of_one(), 3),
}


def accumulated():
    """[(what, {parameter of this rank: its gradient} after two batches, that of a process alone)]; wrappers reduce
    after the second."""
    world, found = comm.world(), []
    alone = tied(np.float64)
    one = Pipeline([alone], comm.world_of_one(), gpipe(1, 4))
    for step, batch in enumerate(batches()):
        one.run(batch, loss_of, seed=1, step=step)
    for what, prepare in ADDING.items():
        stage = prepare(cut_sequential(tied(np.float64), 2, [1] * 10)[world.rank])
        pipeline = Pipeline([stage], world, SCHEDULES["1f1b"]())
        for step, batch in enumerate(batches()):
            with stage.no_sync() if hasattr(stage, "no_sync") and step == 0 else nullcontext():
                pipeline.run(batch, loss_of, seed=1, step=step)
        found.append((what, {name: p.grad.numpy().reshape(-1).copy() for name, p in stage.named_parameters()},
                      {name: p.grad.numpy().reshape(-1) for name, p in alone.named_parameters(remove_duplicate=False)}))
    return found


def recomputed():
    """The losses of three steps of a model whose two layers with one matrix are checkpointed, over the ranks and
    alone."""
    world, found = comm.world(), []
    for ranks in world, comm.world_of_one():
        model = tied(np.float64)
        for place in (5, 8):
            model[place].forward = mt.checkpoint(model[place].forward)
        stage = cut_sequential(model, ranks.size, [1] * 10)[ranks.rank]
        pipeline, optimizer = Pipeline([stage], ranks, gpipe(ranks.size, 4)), optim.SGD(stage.parameters(), lr=0.5)
        found.append([])
        for step, batch in enumerate(batches(3)):
            optimizer.zero_grad()
            found[-1].append(pipeline.run(batch, loss_of, seed=1, step=step))
            optimizer.step()
    return found


def one_layer_in_several_places():
    """The losses of two batches, of a model with one Dropout in three places, over the ranks and alone."""
    world, found = comm.world(), []
    for ranks in world, comm.world_of_one():
        mt.manual_seed(5)
        drop = nn.Dropout(0.4)
        model = nn.Sequential(nn.Linear(plain.FEATURES, 9, dtype=np.float64), drop, drop,
                              nn.Linear(9, 9, dtype=np.float64), drop, nn.Linear(9, plain.CLASSES, dtype=np.float64))
        stage = cut_sequential(model, ranks.size, [1] * 6)[ranks.rank]
        pipeline = Pipeline([stage], ranks, gpipe(ranks.size, 4))
        found.append([pipeline.run(batch, loss_of, seed=1, step=step) for step, batch in enumerate(batches())])
    return found


def wide():
    mt.manual_seed(5)
    first = nn.Linear(90, 70, dtype=np.float64)
    return nn.Sequential(nn.Linear(plain.FEATURES, 90, dtype=np.float64), first, Again(first, True),
                         nn.Linear(90, plain.CLASSES, dtype=np.float64))


def shards(stage):
    """({parameter of this rank's stage: its gradient}, all of the whole model in one process)."""
    mesh = comm.DeviceMesh(dp=2, pp=2)
    mine = fully_shard(cut_sequential(wide(), 2, [1] * 4)[mesh["pp"].rank], mesh["dp"], stage, units=[])
    Pipeline([mine], mesh["pp"], one_forward_one_backward(2, 4)).run(
        next(iter(loader_for(np.float64, 16, mesh["dp"].rank, 2, False).epoch(0))), loss_of, seed=1, step=0,
        over=mesh["dp"])
    alone, one = wide(), comm.world_of_one()
    Pipeline([alone], one, gpipe(1, 4)).run(batches(1)[0], loss_of, seed=1, step=0)
    return ({name: np.concatenate(mesh["dp"].all_gather_object(p.grad.numpy().reshape(-1)))
             for name, p in mine.named_parameters()},
            {name: p.grad.numpy() for name, p in alone.named_parameters(remove_duplicate=False)})


def unused():
    """The gradients of two copies of which only the second is used, wrapped or not."""
    world, found = comm.world(), []
    for wrap in (lambda m: m, lambda m: DistributedDataParallel(m, world.split(world.rank)),
                 lambda m: fully_shard(m, world.split(world.rank), 2),
                 lambda m: DistributedDataParallel(m, world.split(world.rank), exact=True, micro_shards=4)):
        mt.manual_seed(1)
        first = nn.Linear(plain.FEATURES, plain.FEATURES, bias=False, dtype=np.float64)
        stages = cut_sequential(nn.Sequential(Idle(first), Again(first, False)), 2)
        pipeline = Pipeline([wrap(stages[world.rank])], world, gpipe(2, 4))
        pipeline.run(batches(1)[0], loss_of, seed=1, step=0)
        found += [p.grad.numpy().reshape(-1).copy() for p in pipeline.chunks[0].parameters()]
    return found


WRAPPERS = {
    "plain": lambda m, comm: m,
    "DDP": DistributedDataParallel,
    "exact": lambda m, comm: DistributedDataParallel(m, comm, exact=True),
    "ZeRO 1": lambda m, comm: fully_shard(m, comm, 1),
    "ZeRO 3": lambda m, comm: fully_shard(m, comm, 3),
}


class Around(nn.Module):
    """x W, beside a matrix that isn't used, and more elements than go into one piece."""

    def __init__(self, used, unused):
        super().__init__()
        self.weight, self.unused = used, unused
        self.more = nn.Parameter(np.ones(3000))

    def forward(self, x):
        return mt.linear(x if isinstance(x, mt.Tensor) else mt.tensor(x), self.weight) * self.more.mean()


def unused_everywhere(what):
    """Two steps with weight decay of a model whose stages share a matrix that all use and one that none uses:
    ({parameter of this rank: its value}, how many steps each has had), of this stage and of the model in one process.
    ZeRO's pieces are put together; the second rank's are empty, of both matrices."""
    found, dp, world = [], 1 if what == "plain" else 2, comm.world()
    for mesh in (comm.DeviceMesh(world.split(world.rank // (2 * dp)), dp=dp, pp=2),
                 comm.DeviceMesh(comm.world_of_one(), dp=1, pp=1)):
        mt.manual_seed(1)
        used, unused = (nn.Linear(plain.FEATURES, plain.FEATURES, bias=False, dtype=np.float64) for _ in range(2))
        size = mesh["pp"].size
        stages = cut_sequential(nn.Sequential(*(Around(used.weight, unused.weight) for _ in range(2))), size)
        stage = WRAPPERS[what](stages[mesh["pp"].rank], mesh["dp"]) if size > 1 else stages[0]
        pipeline = Pipeline([stage], mesh["pp"], one_forward_one_backward(size, 4))
        optimizer = optim.AdamW(stage.parameters(), lr=0.1, weight_decay=0.1)
        for step in range(2):
            optimizer.zero_grad()
            batch = list(loader_for(np.float64, 16, mesh["dp"].rank, mesh["dp"].size,
                                    what == "exact" and size > 1).epoch(0))[step]
            pipeline.run(batch, loss_of, seed=1, step=step, over=mesh["dp"])
            optimizer.step()
        values = {name: p.numpy().reshape(-1).copy() for name, p in stage.named_parameters(remove_duplicate=False)}
        if "ZeRO" in what:
            values = {name: np.concatenate(mesh["dp"].all_gather_object(value)) for name, value in values.items()}
        found.append((values, optimizer.state_dict()["steps"]))
    return found


def unused_after():
    """A stage's gradient of the matrix that none uses, where there was one before the batch."""
    world = comm.world()
    mt.manual_seed(1)
    used, unused = (nn.Linear(plain.FEATURES, plain.FEATURES, bias=False, dtype=np.float64) for _ in range(2))
    stage = cut_sequential(nn.Sequential(*(Around(used.weight, unused.weight) for _ in range(2))), 2)[world.rank]
    mine = next(iter(stage)).unused
    mine.grad = np.full(mine.shape, 3.0)
    Pipeline([stage], world, gpipe(2, 4)).run(batches(1)[0], loss_of, seed=1, step=0)
    return mine.grad.numpy().copy()


class Scaled(nn.Module):
    """x Σ W, without W's first element: the gradient's is 0 times what may be below 0."""

    def __init__(self, layer, zero):
        super().__init__()
        self.weight, self.share = layer.weight, np.ones(layer.weight.shape)
        self.share[0, 0] = zero

    def forward(self, x):
        return x * mt.sum(self.weight * self.share)


def exact_behind():
    """In exact mode, [(the gradient of a copy, that of a process alone)]: of two of which the second isn't used, and of
    two where its gradient begins with 0.0 or -0.0."""
    world, found = comm.world(), []
    for behind in Idle, lambda layer: Scaled(layer, 0.0), lambda layer: Scaled(layer, -0.0):
        for ranks in world, comm.world_of_one():
            mt.manual_seed(1)
            first = nn.Linear(plain.FEATURES, plain.FEATURES, bias=False, dtype=np.float64)
            stages = cut_sequential(nn.Sequential(Again(first, False), behind(first)), ranks.size)
            stage = DistributedDataParallel(stages[ranks.rank], comm.world_of_one(), exact=True, micro_shards=4)
            Pipeline([stage], ranks, zb_h1(ranks.size, 4)).run(batches(1)[0], loss_of, seed=1, step=0)
            found += [p.grad.numpy().copy() for p in stage.parameters()]
    return list(zip(found[::2], found[1::2], strict=True))


def frozen(path, name, stage):
    """A whole model's state, and what the stages make of it: full_state_dict, and a checkpoint that a whole model
    reads. The first matrix, which stages share, is
    frozen, and stages that train others are fully_shard's."""
    world, placement = comm.world(), placement_of(SCHEDULES[name]())
    whole, again = tied(np.float64), tied(np.float64)
    whole[0].weight.requires_grad_(False)
    wanted = {name: value.copy() for name, value in whole.state_dict().items()}
    stages = cut_sequential(whole, sum(map(len, placement)), [2] * 6 + [3] * 4)
    chunks = [fully_shard(chunk, comm.world_of_one(), stage) if any(p.requires_grad for p in chunk.parameters()) else
              chunk for chunk in (stages[k] for k in placement[world.rank])]
    checkpoints.save(path, chunks, comm=world)
    with mt.no_grad():
        for p in again.parameters():
            p[...] = 0
    checkpoints.load(path, again)
    return wanted, full_state_dict(chunks, world), again.state_dict()


def frozen_beside_zero(stage):
    """({parameter of this rank: its value} after two steps, losses), of a model whose stages share a frozen matrix,
    where the first has nothing else, and so isn't wrapped; the same of one process."""
    found = []
    for mesh in comm.DeviceMesh(dp=2, pp=2), comm.DeviceMesh(comm.world_of_one(), dp=1, pp=1):
        mt.manual_seed(1)
        first = nn.Linear(plain.FEATURES, plain.FEATURES, bias=False, dtype=np.float64).requires_grad_(False)
        model = nn.Sequential(first, nn.Tanh(), Again(first, True), nn.Linear(plain.FEATURES, 70, dtype=np.float64))
        mine = cut_sequential(model, mesh["pp"].size, [1] * 4)[mesh["pp"].rank]
        trains = any(p.requires_grad for p in mine.parameters())
        if trains and mesh.world.size > 1:
            mine = fully_shard(mine, mesh["dp"], stage)
        pipeline = Pipeline([mine], mesh["pp"], one_forward_one_backward(mesh["pp"].size, 4))
        optimizer = optim.SGD([p for p in mine.parameters() if p.requires_grad], 0.1) if trains else None
        loader, losses = loader_for(np.float64, 16, mesh["dp"].rank, mesh["dp"].size, False), []
        for step, batch in zip(range(2), loader.epoch(0), strict=False):
            mine.zero_grad()
            losses.append(pipeline.run(batch, loss_of, seed=1, step=step, over=mesh["dp"]))
            if trains:
                optimizer.step()
        found.append((full_state_dict([mine], mesh["pp"]), losses))
    return found


class Idle(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.weight = layer.weight

    def forward(self, x):
        return x if isinstance(x, mt.Tensor) else mt.tensor(x)


def errors():
    """{what is wrong: (type, message)}."""
    world, found = comm.world(), {}

    def attempt(name, action):
        try:
            action()
            found[name] = None
        except Exception as error:
            found[name] = type(error).__name__, str(error)

    def stage():
        return cut_sequential(tied(np.float64), 2, [1] * 10)[world.rank]
    schedule, batch = gpipe(2, 4), batches(1)[0]
    whole, alone = tied(np.float64), world.split(world.rank)
    cut_sequential(whole, 2, [1] * 10)      # leaves marks; in one stage nothing is tied
    Pipeline([DistributedDataParallel(whole, alone, exact=True)], alone, gpipe(1, 8))
    rows = [[Step(kind, int(k), rank) for kind, k in row.split()] for rank, row in enumerate((
        "F0 I0 W0 F1 I1 W1", "F0 I0 F1 I1 W0 W1"))]        # W0 ahead would wait for W0 behind, that for F1, that for W0
    attempt("exact", lambda: Pipeline([DistributedDataParallel(stage(), world.split(world.rank), exact=True,
                                                               micro_shards=2)], world, rows))
    attempt("frozen", lambda: Pipeline([stage().requires_grad_(world.rank == 0)], world, schedule))
    other = stage()
    if world.rank:
        last = other._modules["9"]
        tie, last.weight = last.weight.leaf.tied, nn.Parameter(np.ones((4, 4)))
        last.weight.leaf.tied = tie
    attempt("shape", lambda: Pipeline([other], world, schedule))
    mine = stage()
    pipeline = Pipeline([mine], world, schedule)
    mine.requires_grad_(world.rank == 0)
    attempt("later", lambda: pipeline.run(batch, loss_of, seed=0, step=0))
    return found
