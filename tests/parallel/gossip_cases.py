"""What the ranks do in test_gossip."""

import numpy as np

import minitorch_dist as mt
from minitorch_dist import checkpoints, comm, ledger, nn, optim
from minitorch_dist.comm.link import SimulatedLink, VirtualClock
from minitorch_dist.parallel import DistributedDataParallel, fully_shard
from minitorch_dist.parallel.experts import moe
from minitorch_dist.parallel.local_sgd import Gossip, topologies
from minitorch_dist.parallel.tensor import parallelize_module

from ..device.fake_cupy import installed
from . import cases, plain
from .diloco_cases import Quadratic, backward, rows_of

LR, MOMENTUM = 0.05, 0.9


def of_degrees(n):
    """A path with one more edge: degrees 1, 2 and, from four ranks on, 3."""
    edges = [(i, i + 1) for i in range(n - 1)] + [(1, 3)] * (n > 3)
    return topologies.metropolis(n, edges, "path")


GRAPHS = {"ring": topologies.ring, "exponential": topologies.exponential, "one-peer": topologies.one_peer,
          "complete": topologies.complete, "path": of_degrees}


def sgd(model, lr=LR):
    return optim.SGD(model.parameters(), lr=lr, momentum=MOMENTUM)


def new(graph="ring", model=None, inner=sgd, **settings):
    """A Gossip of the world's ranks."""
    model = cases.small_model() if model is None else model
    return Gossip(model, inner(model), topology=GRAPHS[graph](comm.world().size), **settings)


def fit(gossip, steps, rows=rows_of):
    for step in steps:
        gossip.zero_grad()
        backward(gossip.model, rows(gossip.comm.rank, step))
        gossip.step()


def values(model):
    return [p.numpy().copy() for p in model.parameters()]


def runs(settings, steps):
    """{(graph, settings' name): (own values, what average() shows, own values again, consensus, values at the end)}."""
    found = {}
    for graph in GRAPHS:
        for name, options in settings.items():
            gossip = new(graph, **options)
            fit(gossip, range(1, steps + 1))
            own = values(gossip.model)
            with gossip.average():
                mean = values(gossip.model)
            again, consensus = values(gossip.model), gossip.consensus()
            gossip.finish()
            found[graph, name] = own, mean, again, consensus, values(gossip.model)
    return found


def by_adamw(steps):
    """D-PSGD, of SGD without momentum: own values after each step; and own values of AdamW by rings."""
    gossip, found = new(inner=lambda model: optim.SGD(model.parameters(), lr=LR), overlap=1), []
    for step in range(1, steps + 1):
        fit(gossip, [step])
        found.append(values(gossip.model))
    adam = new(inner=lambda model: optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1))
    fit(adam, range(1, steps + 1))
    return found, values(adam.model)


def as_data_parallel(batches):
    """The complete graph, each rank its share of every batch: own values, and how far the ranks have parted."""
    rank, size, model = comm.world().rank, comm.world().size, cases.small_model()
    model.load_state_dict({name: value + rank for name, value in model.state_dict().items()})       # rank 0's count
    gossip = new("complete", model)
    fit(gossip, range(len(batches)), lambda rank, step: batches[step][rank::size])
    assert all(len(rows[rank::size]) * size == len(rows) for rows in batches)
    return values(gossip.model), gossip.consensus()


def quadratics(a, centres, start, lr, steps, settings):
    """{(graph, name): mean over the ranks after each step}; ½ Σ a (w - c_rank)² on each."""
    rank, found = comm.world().rank, {}
    for graph in GRAPHS:
        for name, options in settings.items():
            model = Quadratic(a, centres[rank], start)
            gossip = Gossip(model, optim.SGD(model.parameters(), lr=lr), topology=GRAPHS[graph](comm.world().size),
                            **options)
            seen = found[graph, name] = []
            for _ in range(steps):
                gossip.zero_grad()
                model().backward()
                gossip.step()
                with gossip.average():
                    seen.append(model.w.numpy().copy())
    return found


def averaging(graph, starts, steps, settings):
    """(own values, consensus) before, and after each of so many steps at which nothing is learned; at last after
    finish() and one step more."""
    world = comm.world()
    model = Quadratic(1.0, 0.0, np.zeros(starts.shape[1]))
    gossip = Gossip(model, optim.SGD(model.parameters(), lr=0.0), topology=GRAPHS[graph](world.size), **settings)
    model.load_state_dict({"w": starts[world.rank]})
    found = [(values(model)[0], gossip.consensus())]
    for _ in range(steps):
        gossip.zero_grad()
        model().backward()
        gossip.step()
        found.append((values(model)[0], gossip.consensus()))
    gossip.finish()
    gossip.step()
    return [*found, (values(model)[0], gossip.consensus())]


def alike(graph):
    """Whether ranks that have the same values, and learn the same, keep the same bits."""
    gossip = new(graph)
    fit(gossip, range(1, 6), lambda rank, step: rows_of(0, step))
    model = cases.small_model()
    optimizer = sgd(model)
    for step in range(1, 6):
        optimizer.zero_grad()
        backward(model, rows_of(0, step))
        optimizer.step()
    return all((a == b).all() for a, b in zip(values(gossip.model), values(model), strict=True))


def traffic(graph, every, overlap):
    """[(calls, bytes)] of the steps, of the end, and how many bytes of buffers are held."""
    mt.manual_seed(3)
    model = nn.Sequential(nn.Linear(70, 90), nn.Tanh(), nn.Linear(90, 13))
    model[2].bias.requires_grad_(False)
    gossip = new(graph, model, lambda model: optim.SGD([p for p in model.parameters() if p.requires_grad]),
                 every=every, overlap=overlap)
    seen = []
    with ledger.record(memory=True) as memory:
        for _ in range(6):
            gossip.zero_grad()
            (model(mt.tensor(np.ones((5, 70), "f4"))) ** 2).mean().backward()
            with ledger.record() as book:
                gossip.step()
            seen.append((dict(book.calls), dict(book.bytes_sent)))
        with ledger.record() as book:
            gossip.finish()
    return seen, dict(book.calls), memory.live["buffer"]


def waited(overlap, compute, latency):
    """Seconds of six steps on a virtual clock, each of which computes so long; a message each way per step."""
    world, clock = comm.world(), VirtualClock()
    gossip = new("one-peer", overlap=overlap)
    link = SimulatedLink(latency, 1e30, clock)
    world.hooks.append(link)
    try:
        for step in range(1, 7):
            clock.sleep(compute)
            fit(gossip, [step])
        seconds = clock()
    finally:
        world.hooks.remove(link)
    gossip.finish()
    return seconds


def with_scaler(steps, spoilt):
    """Own values after so many steps, of which rank 1 leaves one out."""
    gossip, scaler = new(), optim.GradScaler(init_scale=2.0 ** 10)
    for step in range(1, steps + 1):
        gossip.zero_grad()
        with np.errstate(invalid="ignore"):
            backward(gossip.model, rows_of(gossip.comm.rank, step), scale=scaler.scale,
                     spoil=(gossip.comm.rank, step) == (1, spoilt))
            gossip.step(scaler)
        scaler.update()
    return values(gossip.model)


def pruned():
    """Which weights aren't 0 after each step, of those that are kept: on all ranks, whom others send theirs."""
    mask = np.arange(plain.HIDDEN * plain.FEATURES).reshape(plain.HIDDEN, plain.FEATURES) % 2
    gossip, found = new("one-peer", overlap=1), []

    def after():
        gossip.model[0].weight.data[...] *= mask
    after()
    for step in range(1, 6):
        gossip.zero_grad()
        backward(gossip.model, rows_of(gossip.comm.rank, step))
        gossip.step(after=after)
        found.append((gossip.model[0].weight.numpy() != 0) == mask)
    gossip.finish()
    return [bool(seen.all()) for seen in [*found, (gossip.model[0].weight.numpy() != 0) == mask]]


# ---------------------------------------------------------------- saved

def normed():
    mt.manual_seed(4)
    return nn.Sequential(nn.Linear(plain.FEATURES, plain.HIDDEN, dtype=np.float64),
                         nn.BatchNorm(plain.HIDDEN, dtype=np.float64), nn.Tanh(),
                         nn.Linear(plain.HIDDEN, plain.CLASSES, dtype=np.float64))


def statistics(model):
    return [np.array(b) for _, b in model.named_buffers()]


def with_statistics(steps):
    """A BatchNorm's statistics after so many steps: own, averaged, own again, at the end."""
    gossip = new("ring", normed())
    fit(gossip, range(1, steps + 1))
    own = statistics(gossip.model)
    with gossip.average():
        mean = statistics(gossip.model)
    again = statistics(gossip.model)
    gossip.finish()
    return own, mean, again, statistics(gossip.model)


def resumed(folder, at, settings, kind):
    """(own values and statistics after 9 steps: of a run that saves after step `at`, of one that doesn't, of those that
    go on from its checkpoint and from its state_dict), what a model alone loads, what average() had then, whether
    something was on its way."""
    world = comm.world()

    def fresh():
        return new("one-peer", normed(), lambda model: getattr(optim, kind)(model.parameters(), lr=0.01), **settings)
    first, second, third, fourth = (fresh() for _ in range(4))
    fit(first, range(1, at + 1))
    store = checkpoints.Checkpoints(folder, world)
    with first.average():
        store.save(at, first.model, first)
        mean = values(first.model) + statistics(first.model)
    under_way, saved = first.pending is not None, first.state_dict()
    fit(first, range(at + 1, 10))
    fit(second, range(1, 10))
    for run in (third, fourth):
        fit(run, range(1, 4))       # what it has done and sent counts for nothing
    fourth.load_state_dict(saved)
    store.load(third.model, third)
    alone = normed()
    checkpoints.load(store.path(at), alone, comm=world)
    for run in (third, fourth):
        fit(run, range(at + 1, 10))
    return ([values(run.model) + statistics(run.model) for run in (first, second, third, fourth)],
            values(alone) + statistics(alone), mean, under_way)


def refused_at_load(folder):
    """What is said to a checkpoint of other settings, of other ranks, and of values that aren't the same."""
    world, said = comm.world(), []
    store, gossip = checkpoints.Checkpoints(folder, world), new()
    fit(gossip, range(1, 3))

    def told(act):
        try:
            act()
            said.append(None)
        except (ValueError, RuntimeError) as error:
            said.append(str(error))
    told(lambda: store.save(2, gossip.model, gossip))
    with gossip.average():
        store.save(2, gossip.model, gossip)
        for act in (lambda: gossip.step(), lambda: gossip.finish(), lambda: gossip.average().__enter__(),
                    lambda: store.load(gossip.model, gossip)):
            told(act)
    other, model = new("path", every=2), cases.small_model()
    told(lambda: store.load(other.model, other))
    alone = Gossip(model, sgd(model), world.split(world.rank), topology=topologies.ring(1))
    told(lambda: store.load(alone.model, alone))
    return said


def on_host_and_gpu(overlap):
    """[values and statistics] of a run on the host, and of one on the stand-in for a GPU; each goes on from a state."""
    def run(device):
        gossip = new("one-peer", normed().to(device), overlap=overlap)
        x, labels = plain.dataset()
        for step in range(1, 6):
            rows = rows_of(gossip.comm.rank, step)
            gossip.zero_grad()
            nn.cross_entropy(gossip.model(mt.tensor(x[rows]).to(device)), labels[rows]).backward()
            gossip.step()
            if step == 3:
                with gossip.average():
                    state = gossip.state_dict()
        gossip.load_state_dict(state)
        distance = gossip.consensus()
        gossip.finish()
        return [*gossip.model.state_dict().values(), np.array(distance)]
    host = run("cpu")
    with installed():
        return host, run("cuda:0")


# ---------------------------------------------------------------- what is wrong

def disagreeing():
    """{what the last rank has otherwise: what this one is told}."""
    world, said = comm.world(), {}
    last = world.rank == world.size - 1
    for name, options in {"path": {"graph": "path"}, "every=2": {"every": 2}, "overlap=1": {"overlap": 1},
                          "'lr': 0.5": {"inner": lambda model: sgd(model, 0.5)}}.items():
        try:
            new(**(options if last else {}))
            said[name] = "nothing"
        except ValueError as error:
            said[name] = str(error)
    return said


def divided_experts(world):
    model = nn.GPT(vocabulary=11, length=6, layers=1, heads=2, dim=8, moe={"experts": 4, "k": 1})
    return parallelize_module(model, world, moe.plan_of(model))


def wrapped_wrongly():
    """{what is wrong: what is said}."""
    world, said = comm.world(), {}

    def told(name, make, topology=None):
        try:
            model = make()
            Gossip(model, sgd(model), topology=topology or topologies.ring(world.size))
            said[name] = None
        except ValueError as error:
            said[name] = str(error)
    told("ddp", lambda: DistributedDataParallel(cases.small_model(), world))
    told("alone", lambda: DistributedDataParallel(cases.small_model(), world.split(world.rank)))
    told("sharded", lambda: fully_shard(cases.small_model(), world, stage=3))
    told("tp", lambda: parallelize_module(cases.small_model(), world, {"0": "column", "2": "row"}))
    told("experts", lambda: divided_experts(world))
    told("dtypes", lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, dtype=np.float64)))
    told("ranks", cases.small_model, topologies.ring(world.size + 1))
    told("no topology", cases.small_model, "ring")
    return said


def diverged(overlap):
    """What this rank is told, if rank 1 of a ring has inf in its gradients in step 3; whether its values are finite."""
    gossip, told = new("ring", overlap=overlap), None
    rank = gossip.comm.rank
    fit(gossip, range(1, 3))
    gossip.zero_grad()
    with np.errstate(invalid="ignore"):
        backward(gossip.model, rows_of(rank, 3), spoil=rank == 1)
        try:
            gossip.step()
            if overlap and rank != 3:       # who isn't near would send what nobody takes
                gossip.zero_grad()
                gossip.step()
        except ValueError as error:
            told = str(error)
    gossip._settle()
    return told, all(np.isfinite(v).all() for v in values(gossip.model))


def alone_at_a_meeting():
    """Rank 1 leaves after two steps; the others wait for it."""
    gossip = new()
    fit(gossip, range(1, 3 if gossip.comm.rank == 1 else 5))


if __name__ == "__main__":
    alone_at_a_meeting()
