"""What the ranks do in the tests of the parameter server."""

import time

import numpy as np

import minitorch_dist as mt
from minitorch_dist import backend, comm, ledger, nn, optim
from minitorch_dist.comm.link import VirtualClock
from minitorch_dist.parallel import DistributedDataParallel
from minitorch_dist.parallel.servers import ParameterServer
from minitorch_dist.parallel.servers.parameter_shard import Request

from . import cases
from .cases import digest, loader_for, model_with_dropout, parameters, small_model

OPTIMIZERS = cases.OPTIMIZERS | {"adagrad": lambda params: optim.Adagrad(params, lr=0.05)}
EXACT = {"adam": "f4", "adagrad": "f8"}      # optimizer -> dtype
STEPS, V = 12, 8


def sgd(lr):
    """An optimizer for servers."""
    return lambda params: optim.SGD(params, lr=lr)


def optimizer_of(model, name):
    return OPTIMIZERS[name](model.parameters())


# ---------------------------------------------------------------- sync

def exact_steps(model, optimizer, loader):
    """The digest after each of STEPS, three epochs; the last batch of an epoch is uneven."""
    digests = []
    while len(digests) < STEPS:
        for batch in loader.epoch(len(digests) // len(loader)):
            optimizer.zero_grad()
            for shard in batch.shards:
                with backend.random_scope(3, len(digests), batch.count, shard.rows, V):
                    (nn.cross_entropy(model(shard.inputs), shard.labels, reduction="sum") / batch.count).backward()
            optimizer.step()
            digests.append(digest(model))
    return digests


def exact_by_ddp():
    """{optimizer: digests}"""
    world, found = comm.world(), {}
    for name, dtype in EXACT.items():
        model = DistributedDataParallel(model_with_dropout(np.dtype(dtype).type), world, exact=True, micro_shards=V)
        loader = loader_for(np.dtype(dtype).type, world.rank, world.size, V, cases.EXACT_BATCH)
        found[name] = exact_steps(model, optimizer_of(model, name), loader)
    return found


def exact_by_servers(servers):
    """{optimizer: (digests, None on servers; the last one of all ranks' own models)}"""
    from threadpoolctl import threadpool_limits
    threadpool_limits(1)
    world, found = comm.world(), {}
    alone = world.split(world.rank)
    for name, dtype in EXACT.items():
        dtype, digests = np.dtype(dtype).type, None
        model = model_with_dropout(dtype)
        if world.size == 1 or world.rank >= servers:
            model = DistributedDataParallel(model, alone, exact=True, micro_shards=V // max(world.size - servers, 1))
        with ParameterServer(model, OPTIMIZERS[name], world, servers) as ps:
            if ps.is_worker:
                digests = exact_steps(model, ps, loader_for(dtype, ps.index, len(ps.workers), V, cases.EXACT_BATCH))
        found[name] = digests, digest(model), ps.version, ps.staleness()
    return found


def train(ps, model, steps, loader):
    """Steps on the loader's share of the batches."""
    done = 0
    while done < steps:
        for batch in loader.epoch(done // len(loader), start=done % len(loader)):
            if done < steps:
                ps.zero_grad()
                (nn.cross_entropy(model(batch.inputs), batch.labels, reduction="sum") / batch.count).backward()
                ps.step()
                done += 1


def like_plain(servers, momentum, mode="sync", max_staleness=None):
    """The parameters after 40 steps, and the staleness of the pushes."""
    model = small_model()
    with ParameterServer(model, lambda p: optim.SGD(p, lr=0.05, momentum=momentum), comm.world(), servers, mode,
                         max_staleness) as ps:
        if ps.is_worker:
            train(ps, model, 40, loader_for(np.float64, ps.index, len(ps.workers)))
    return parameters(model), ps.staleness()


class Heads(nn.Module):
    """Worker k of two uses head k, then the other; nobody the third."""

    def __init__(self):
        super().__init__()
        for k in range(3):
            setattr(self, f"head{k}", nn.Linear(3, 2, bias=False, dtype=np.float64))


def unused(mode):
    """(initial values, values after two steps) of Heads, whose gradients are ones."""
    mt.manual_seed(2)
    model = Heads()
    first = parameters(model)
    with ParameterServer(model, lambda p: optim.SGD(p, lr=0.1, weight_decay=0.5), comm.world(), mode=mode) as ps:
        for step in range(2 if ps.is_worker else 0):
            ps.zero_grad()
            getattr(model, f"head{(ps.index + step) % 2}")(np.ones((1, 3))).sum().backward()
            ps.step()
    return first, parameters(model)


# ---------------------------------------------------------------- async, in virtual time

class Vector(nn.Module):
    """A parameter w; what is pushed is chosen."""

    def __init__(self, size=24, dtype=np.float64):
        super().__init__()
        self.w = nn.Parameter(np.zeros(size, dtype))


def push(ps, gradient):
    """One step with this gradient."""
    ps.zero_grad()
    (ps.module.w * gradient).sum().backward()
    ps.step()


def in_virtual_time(seconds, until, mode, max_staleness=None, servers=1):
    """Worker k's step takes seconds[k], or the next of them; (history, version, pushes of this worker, final w)."""
    clock, random = VirtualClock(), np.random.default_rng(comm.world().rank)
    with ParameterServer(Vector(), sgd(0.1), comm.world(), servers, mode, max_staleness, clock=clock) as ps:
        if ps.is_worker:
            mine = seconds[ps.index]
            while clock() < until:
                clock.sleep(mine[ps.steps % len(mine)] if isinstance(mine, list) else mine)
                push(ps, random.standard_normal(24))
    return ps.history, ps.version, ps.steps, ps.module.w.numpy().copy()


def real_arrivals(delays, orders=None, max_staleness=None, servers=2):
    """(digest, orders, staleness, each version that this worker saw) after steps with Adam of workers that sleep."""
    model = small_model(np.float32)
    seen = []
    with ParameterServer(model, OPTIMIZERS["adam"], comm.world(), servers, "async", max_staleness,
                         orders=orders) as ps:
        if ps.is_worker:
            loader = loader_for(np.float32, ps.index, len(ps.workers))
            for batch in loader.epoch(0):
                time.sleep(delays[ps.index])
                ps.zero_grad()
                (nn.cross_entropy(model(batch.inputs), batch.labels, reduction="sum") / batch.count).backward()
                ps.step()
                seen.append(tuple(ps.versions))
    return digest(model), ps.orders, ps.staleness(), seen


# ---------------------------------------------------------------- Downpour, bytes

def downpour(n_fetch, n_push, local_lr, steps):
    """The copy after each step, with the gradient w + step, and the final w."""
    seen = []
    with ParameterServer(Vector(), lambda p: optim.Adagrad(p, lr=0.3), comm.world(), 1, "async", None, n_fetch, n_push,
                         local_lr) as ps:
        for step in range(steps if ps.is_worker else 0):
            w = ps.module.w.numpy().copy()
            push(ps, w + np.arange(1, 25) + step)
            seen.append(ps.module.w.numpy().copy())
    return seen, ps.module.w.numpy().copy()


def traffic(servers, steps, n_fetch=1, n_push=1):
    """(bytes and messages by (axis, op); this rank's blocks)."""
    mt.manual_seed(0)
    model = nn.Sequential(nn.Linear(61, 53, dtype=np.float64), nn.Linear(53, 3))
    for p in model[1].parameters():     # float32, and frozen: stays at home
        p.requires_grad_(False)
    ps = ParameterServer(model, sgd(0.1), comm.world(), servers, "async", n_fetch=n_fetch, n_push=n_push)
    with ledger.record() as book:
        with ps:
            for step in range(steps if ps.is_worker else 0):
                ps.zero_grad()
                model[0](np.full((1, 61), step + 1.0)).sum().backward()
                ps.step()
    rpc = {op: n for (axis, op), n in book.bytes_sent.items() if axis == "rpc"}
    return rpc, {op: n for (axis, op), n in book.calls.items() if axis == "rpc"}, ps.blocks, ps.is_worker


# ---------------------------------------------------------------- misuse

def misuse():
    """{what: the error}."""
    world, said = comm.world(), {}
    last = world.rank == world.size - 1

    def attempt(name, act):
        try:
            act()
            said[name] = "nothing"
        except (RuntimeError, ValueError) as error:
            said[name] = f"{type(error).__name__}: {error}"
    attempt("model", lambda: ParameterServer(Vector(25 if last else 24), sgd(0.1), world))
    attempt("mode here", lambda: ParameterServer(Vector(), sgd(0.1), world, mode="async" if last else "sync"))
    attempt("bound here", lambda: ParameterServer(Vector(), sgd(0.1), world, max_staleness=1 if last else None))
    attempt("all serve", lambda: ParameterServer(Vector(), sgd(0.1), world, servers=world.size))
    attempt("none serves", lambda: ParameterServer(Vector(), sgd(0.1), world, servers=0))
    attempt("no such mode", lambda: ParameterServer(Vector(), sgd(0.1), world, mode="hogwild"))
    for name, value in {"max_staleness": 1, "n_fetch": 2, "n_push": 3, "local_lr": 0.5, "orders": [[1]]}.items():
        attempt(f"sync and {name}", lambda one={name: value}: ParameterServer(Vector(), sgd(0.1), world, **one))
    for name, value in {"n_push": 0, "n_fetch": 0, "max_staleness": -1}.items():
        attempt(name, lambda one={name: value}: ParameterServer(Vector(), sgd(0.1), world, mode="async", **one))
    attempt("orders", lambda: ParameterServer(Vector(), sgd(0.1), world, mode="async", orders=[[1], [1]]))
    attempt("too small", lambda: ParameterServer(Vector(3), sgd(0.1), world, servers=2))
    attempt("batch norm", lambda: ParameterServer(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm(2)), sgd(0.1), world))
    attempt("dtypes", lambda: ParameterServer(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=np.float64)),
                                              sgd(0.1), world))
    attempt("nothing to train", lambda: ParameterServer(Vector().requires_grad_(False), sgd(0.1), world))
    attempt("no optimizer", lambda: ParameterServer(Vector(), sgd(-1.0), world))
    attempt("of norms", lambda: ParameterServer(Vector(), optim.LAMB, world))
    attempt("of means", lambda: ParameterServer(Vector(), optim.Adafactor, world))
    other = ParameterServer(Vector(), sgd(0.1), world)
    with ParameterServer(Vector(), sgd(0.1), world, mode="async") as ps:
        attempt("another block", other.__enter__)
        if ps.is_server:
            attempt("a server's step", ps.step)
        else:
            attempt("not finite", lambda: push(ps, np.where(np.arange(24) == 5, np.inf, 1.0)))
            for name, gradient in (("another shape", np.ones(25)), ("another dtype", np.ones(24, np.float32))):
                request = Request(world.rank, 0.0, 0, gradient, frozenset(), True)
                attempt(name, lambda request=request: ps.shards[0].rpc_sync().ask(request))
            ps.accrued[...] = 0
            push(ps, np.ones(24))       # nothing has happened
    attempt("a second block", ps.__enter__)
    said["and then"] = ps.version, ps.module.w.numpy().copy()
    return said


def divides_by_zero(parameters):
    """An optimizer that raises."""
    optimizer = optim.SGD(parameters, lr=0.1)
    optimizer.step = lambda: 1 / 0
    return optimizer


def failing_optimizer():
    """What the workers hear of it, with the note."""
    said = None
    with ParameterServer(Vector(), divides_by_zero, comm.world()) as ps:
        try:
            if ps.is_worker:
                push(ps, np.ones(24))
        except ZeroDivisionError as error:
            said = error.__notes__
    return said


def fails_once(servers):
    """(errors that this worker has caught, w): the last server's optimizer raises at its first step."""
    world, caught = comm.world(), 0

    def optimizer(parameters):
        made = optim.SGD(parameters, lr=1.0)
        step, left = made.step, [world.rank == servers - 1]
        made.step = lambda: 1 / 0 if left and left.pop() else step()
        return made
    with ParameterServer(Vector(32), optimizer, world, servers, "async") as ps:
        for _ in range(2 if ps.is_worker else 0):
            try:
                push(ps, np.ones(32))
            except ZeroDivisionError:
                caught += 1
    return caught, ps.module.w.numpy().copy()


def left_by_an_error():
    """What each rank hears when worker 1 raises in the block, and all catch it outside."""
    try:
        with ParameterServer(Vector(), sgd(0.1), comm.world()):
            if comm.world().rank == 1:
                raise KeyError("to go on")
    except (KeyError, RuntimeError) as error:
        return type(error).__name__, str(error)


def uneven_in_sync():
    """What a worker hears that takes more steps than worker 1."""
    world, said = comm.world(), None
    with ParameterServer(Vector(), sgd(0.1), world) as ps:
        try:
            for _ in range(2 if world.rank == 1 else 3):
                if ps.is_worker:
                    push(ps, np.ones(24))
        except RuntimeError as error:
            said = str(error)
    return said
