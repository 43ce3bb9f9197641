"""What the ranks do in the tests of a pipeline's evaluation. What must hold is checked by the parent process."""

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, data, ledger, nn
from minitorch_dist.data.packing import pack
from minitorch_dist.parallel import DistributedDataParallel, fully_shard
from minitorch_dist.parallel.pipelines import Pipeline, cut_gpt, full_state_dict
from minitorch_dist.parallel.pipelines.schedules import gpipe, one_forward_one_backward, schedule_of

from . import plain
from .pipeline_cases import SEED, loss_of, model, parts_for
from .pipeline_zero_cases import adamw

ROWS = 29


def measure(output, labels):
    """The sum of losses, how many are right, and how many there are."""
    return loss_of(output, labels), (output.numpy().argmax(1) == labels).sum(), len(labels)


def loader_for(mesh, rows, batch, exact=False):
    """Of the first so many samples, in their order."""
    x, y = (array[:rows] for array in plain.dataset())
    return data.Loader(x, y, batch, rank=mesh["dp"].rank, size=mesh["dp"].size, micro_shards=8 if exact else 1,
                       shuffle=False)


def of_whole(state, norms, rows):
    """The sums by one process's model of this state."""
    whole = model(np.float64, norms).eval()
    whole.load_state_dict(state)
    x, y = (array[:rows] for array in plain.dataset())
    with mt.no_grad():
        return [float(part) for part in measure(whole(x), y)]


def trained(name, pp, m, chunks, wrapper, evaluations):
    """(losses of three steps; of each evaluation after the second and the third: (what it found, what the whole model
    of that state finds, whether modules are in the modes in which they were, ledger)) of a pipeline; wrapper: None,
    "ddp", "exact", or a stage of fully_shard."""
    mesh, exact, norms = comm.DeviceMesh(dp=-1, pp=pp), wrapper == "exact", m < 5
    schedule = schedule_of(name, pp, m, chunks)
    parts = parts_for(model(np.float64, norms), schedule, mesh.coords["pp"])
    if wrapper in ("ddp", "exact"):
        parts = [DistributedDataParallel(part, mesh["dp"], exact=exact) for part in parts]
    elif wrapper is not None:
        parts = [fully_shard(part, mesh["dp"], stage=wrapper) for part in parts]
    for layer in (layer for part in parts for layer in part.modules()):
        layer.training = not isinstance(layer, nn.Tanh)     # some are in evaluation mode all the time
    optimizer, pipeline = adamw(parts), Pipeline(parts, mesh["pp"], schedule)
    loader, losses, found = loader_for(mesh, 48, 16, exact), [], []
    rows = 32 if exact else ROWS        # whose last batch has 5
    for step, batch in enumerate(loader.epoch(0)):
        for part in parts:
            part.zero_grad()
        losses.append(pipeline.run(batch, loss_of, seed=SEED, step=step, over=mesh["dp"]))
        if optimizer is not None:
            optimizer.step()
        if evaluations and step:
            before = [layer.training for part in parts for layer in part.modules()]
            live, wanted = pipeline.live, full_state_dict(parts, mesh["pp"])
            with ledger.record() as book:
                got = sum(pipeline.evaluate(one, measure, over=mesh["dp"])
                          for one in loader_for(mesh, rows, 16 if exact else 8, exact).epoch(0))
            same = before == [layer.training for part in parts for layer in part.modules()] and live == pipeline.live
            found.append((got, of_whole(wanted, norms, rows), same, {
                (axis, op): (book.calls[axis, op], book.bytes_sent[axis, op]) for axis, op in book.calls}))
    return losses, found


def stages_of_gpt(packed):
    """(the sum of losses of a GPT in two stages, of targets; the same of the undivided one)."""
    world, rng = comm.world(), np.random.default_rng(3)
    mt.manual_seed(4)
    gpt = nn.GPT(17, 12, layers=2, heads=2, dim=8, dropout=0.3, dtype=np.float64)
    if packed:
        rows = pack([rng.integers(0, 17, n) for n in (5, 9, 12, 3, 7, 11, 4)], 12)
        inputs, targets = rows.rows, rows.targets
    else:
        inputs, targets = (rng.integers(0, 17, (7, 12)) for _ in range(2))
    gpt.eval()
    with mt.no_grad():
        logits = gpt(inputs[..., 0], inputs[..., 1]) if packed else gpt(inputs)
        wanted = nn.cross_entropy(logits, targets, reduction="sum").item()
    gpt.train()
    stage = cut_gpt(gpt, 2)[world.rank]
    pipeline = Pipeline([stage], world, one_forward_one_backward(2, 3))
    batch = next(iter(data.Loader(inputs, targets, len(inputs), shuffle=False).epoch(0)))
    return pipeline.evaluate(batch, None, packed=packed), wanted


def errors():
    """{what is wrong: (type, message)}, on the last stage where it alone hears of it."""
    world, found = comm.world(), {}
    mesh = comm.DeviceMesh(dp=1, pp=2)
    batch = next(iter(loader_for(mesh, ROWS, 8).epoch(0)))
    part = parts_for(model(np.float64), gpipe(2, 3), world.rank)
    ends = {"nothing": lambda y, labels: None, "text": lambda y, labels: ("2", 1.0),
            "each sample": lambda y, labels: y.numpy().sum(1), "uneven": lambda y, labels: (1.0, [1.0, 2.0])}
    for name, end in ends.items():
        pipeline = Pipeline(part, world.split(0), gpipe(2, 3))
        if world.rank == 0:     # it goes no further than its forwards
            pipeline._of_all = lambda over: None
        try:
            pipeline.evaluate(batch, end)
            found[name] = None
        except Exception as error:
            found[name] = type(error).__name__, str(error)
    said = []
    for call in (lambda pipeline: pipeline.evaluate(batch, None),
                 lambda pipeline: pipeline.evaluate(batch, measure) if world.rank else
                 pipeline.run(batch, loss_of, seed=0, step=0)):
        try:
            call(Pipeline(part, world.split(0), gpipe(2, 3)))
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return found, said
