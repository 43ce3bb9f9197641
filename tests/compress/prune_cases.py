"""What the ranks do in the tests of pruning and of averages."""

from pathlib import Path

import numpy as np

import minitorch_dist as mt
from minitorch_dist import checkpoints, comm, nn, optim
from minitorch_dist.compress import prune, soup
from minitorch_dist.compress.lottery import lottery_ticket
from minitorch_dist.parallel import DistributedDataParallel, full_state_dict, fully_shard
from minitorch_dist.parallel.sharding.annotate import shard_parameters
from minitorch_dist.parallel.tensor import tensor_parallel as tp

STEPS, ROWS = 6, 12
WAYS = {"data": lambda net: DistributedDataParallel(net, comm.world()),
        "exact": lambda net: DistributedDataParallel(net, comm.world(), exact=True, micro_shards=2)}
WAYS |= {f"stage {k}": lambda net, k=k: fully_shard(net, comm.world(), stage=k) for k in (1, 2, 3)}


def network(dtype=np.float64):
    """Its matrices are cut by ZeRO in the middle of rows; with a BatchNorm (and no bias before it, whose gradient would
    be rounding alone)."""
    mt.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 90, False, dtype=dtype), nn.BatchNorm(90, dtype=dtype), nn.Tanh(),
                         nn.Linear(90, 101, dtype=dtype), nn.ReLU(), nn.Linear(101, 3, dtype=dtype))


def rows(step, rank=0, size=1):
    random = np.random.default_rng(step)
    x, ct = random.standard_normal((ROWS, 7)), random.standard_normal((ROWS, 3))
    here = slice(ROWS * rank // size, ROWS * (rank + 1) // size)
    return x[here], ct[here]


def backward(model, step):
    """One step's gradients of a model, wrapped or not."""
    world = getattr(model, "comm", None)
    x, ct = rows(step, world.rank, world.size) if world else rows(step)
    ((model(mt.tensor(x)) - ct) ** 2).sum().backward()


def values_of(model):
    return full_state_dict(model) if hasattr(model, "units") else model.state_dict()


def gradual(way=None, start=0, steps=STEPS, folder=None):
    """Train and prune: (masks, values on rank 0, the rows of the sparsity table, masks after every step).

    way     None: without a wrapper
    start   > 0: from the checkpoint of that step on; with a folder one is written after `steps` steps
    """
    net = network()
    model = net if way is None else WAYS[way](net)
    world = getattr(model, "comm", None)
    optimizer = optim.AdamW(model.parameters(), 0.03, weight_decay=0.3)
    saved = checkpoints.Checkpoints(Path(folder), world) if folder else None
    schedule, masks = prune.cubic(0.8, 1, 5), None
    if start:
        _, facts = saved.load(model, optimizer)
        masks = prune.from_facts(facts["masks"])
    pruning = prune.GradualPruning(model, schedule, every=2, steps=start, masks=masks)
    history = []
    for step in range(start, steps):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        pruning.step()
        history.append(prune.to_facts(pruning.masks))
        model.eval()
        with mt.no_grad():      # stages 1 and 2 have gathered the values now, and are written to after that
            model(mt.tensor(rows(99)[0]))
        model.train()
        pruning.apply()
    if folder and not start:
        saved.save(steps, model, optimizer, masks=prune.to_facts(pruning.masks))
    return pruning.masks, values_of(model), prune.sparsity(model).rows, history


def all_ways():
    return {way: gradual(way) for way in ("data", "stage 1", "stage 2", "stage 3")}


def other_masks(way):
    """The error where the last rank's masks are others, of a model in data parallelism or on a mesh."""
    model, net, world = network(), network(), comm.world()
    if way == "mesh":
        shard_parameters(net, comm.DeviceMesh(dp=2, tp=2), {"0.weight": ["tp", -1]})
    else:
        net = WAYS[way](net)
    try:
        prune.Pruning(net, prune.random(model, 0.5, seed=int(world.rank == world.size - 1)))
    except ValueError as error:
        return str(error)


def bad_weights():
    """The error that rank 0 meets when it makes masks for a model that is cut."""
    net = network()
    with mt.no_grad():
        net[3].weight[0, 0] = np.nan
    try:
        prune.magnitude(WAYS["stage 3"](net), 0.5)
    except ValueError as error:
        return str(error)


def heads():
    """Tensor parallelism: (masks, whole values, rows of the table) of a GPT's pruned matrices."""
    mt.manual_seed(5)
    gpt = nn.GPT(11, 5, layers=1, heads=4, dim=12, dtype=np.float64)
    tp.parallelize_module(gpt, comm.world(), tp.plan_of(gpt))
    masks = prune.magnitude(gpt, 0.6)
    prune.Pruning(gpt, masks)
    return masks, tp.full_state_dict(gpt), prune.sparsity(gpt).rows


def tickets(wrapped=True):
    """(rounds as (kept, scores, masks as text), start) of two rounds of lottery tickets."""
    def make_model(seed):
        mt.manual_seed(seed)
        net = nn.Sequential(nn.Linear(7, 20, dtype=np.float64), nn.Tanh(), nn.Linear(20, 3, dtype=np.float64))
        return DistributedDataParallel(net, comm.world()) if wrapped else net

    def train(model, after_step, start):
        optimizer = optim.SGD(model.parameters(), 1e-3, momentum=0.9)
        for step in range(start, 5):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
            after_step()
        return float(sum(np.abs(value).sum() for value in model.state_dict().values()))
    found = lottery_ticket(make_model, train, 2, 0.5, rewind=2)
    return [(r.kept, r.ticket, r.reinitialised, r.random, prune.to_facts(r.masks)) for r in found.rounds], found.start


def averages(way=None):
    """{"ema", "swa": the values inside applied(), "after": those after it}, with what the model computes by them."""
    net = network()
    model = net if way is None else WAYS[way](net)
    optimizer = optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    kinds = {"ema": soup.ExponentialMovingAverage(model, 0.7), "swa": soup.StochasticWeightAverage(model)}
    for step in range(4):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        for average in kinds.values():
            average.update()
    found, x = {}, mt.tensor(rows(99)[0])
    model.eval()
    with mt.no_grad():
        model(x)        # stages 1 and 2 have gathered the values now
        for name, average in kinds.items():
            with average.applied():
                found[name] = values_of(model) | {"output": model(x).numpy().copy()}
        found["after"] = values_of(model) | {"output": model(x).numpy().copy()}
    return found


def all_averages():
    return {way: averages(way) for way in ("data", "stage 1", "stage 3")}


def statistics(way=None):
    """BatchNorm's buffers after update_bn over three batches, each rank its share."""
    net = network()
    model = net if way is None else WAYS[way](net)
    world = getattr(model, "comm", None)
    share = (world.rank, world.size) if world else ()
    soup.update_bn(model, [mt.tensor(rows(step, *share)[0]) for step in range(3)])
    return {name: np.array(b) for name, b in net.named_buffers()}


def all_statistics():
    return {way: statistics(way) for way in ("data", "exact", "stage 3")}
