"""What the ranks do in the tests of hybrid sharding. What must hold is checked by the parent process."""

import numpy as np

import minitorch_dist as mt
from minitorch_dist import checkpoints, comm, ledger, optim
from minitorch_dist.compress.prune import sparsity
from minitorch_dist.parallel import (
    DistributedDataParallel,
    full_optimizer_state_dict,
    full_state_dict,
    fully_shard,
    load_full_optimizer_state_dict,
)
from minitorch_dist.parallel.tensor import tensor_parallel as tp

from .sharded_cases import CURVES, EXACT, EXACT_STEPS, STEPS, Odd, Training, backward, batch, digest, grads, net, said
from .sharded_misuse_cases import Maybe


def mesh_of(copies, **more):
    return comm.DeviceMesh(replicate=copies, shard=-1, **more)


def hybrid(mesh, stage, **options):
    """What wraps a module."""
    def wrap(module):
        units = {"units": module.units()} if isinstance(module, Odd) else {}
        return fully_shard(module, mesh["replicate", "shard"], stage, shard_over=mesh["shard"], **units, **options)
    return wrap


def whole(model):
    """A digest of the values that this rank gathers."""
    with model.gathered() as module:
        return digest({name: p.numpy() for name, p in module.named_parameters()})


# ---------------------------------------------------------------- one curve

def curves(ways):
    """[(losses, norms, rank 0's state dict, digest of this rank's values, unused parameters)] of ways (name, copies,
    stage)."""
    world, seen = comm.world(), []
    for name, copies, stage in ways:
        model, optimizer, clip, accumulate, size = CURVES[name]
        it = Training(model, optimizer, hybrid(mesh_of(copies), stage), world, batch=size)
        it.run(STEPS, clip, accumulate)
        seen.append((it.losses, it.norms, full_state_dict(it.model), whole(it.model), it.model.unused_parameters))
    return seen


def exact_curves(ways):
    """The same in exact mode, of float32: [(losses, norms, rank 0's digest after each step, digest)]. Without copies:
    DistributedDataParallel."""
    from threadpoolctl import threadpool_limits
    threadpool_limits(1)
    world, seen = comm.world(), []
    for name, copies, stage in ways:
        model, optimizer, clip = EXACT[name]
        mesh = mesh_of(max(copies, 1))
        if copies == 4:     # whose own order isn't the tree's, as that of others is by chance
            mesh["replicate"].algorithm = "ring"
        wrap = hybrid(mesh, stage, exact=True) if copies else \
            (lambda module: DistributedDataParallel(module, world, exact=True))
        it = Training(model, optimizer, wrap, world, "f4", True, batch=18)

        def watch(it=it, copies=copies):
            state = full_state_dict(it.model) if copies else it.model.state_dict()
            it.digests.append(state and digest(state))
        it.run(EXACT_STEPS, clip, watch=watch)
        seen.append((it.losses, it.norms, it.digests, whole(it.model) if copies else None))
    return seen


def tensors(copies):
    """Rank 0's losses and state dict of a model that is cut by tensor parallelism as well, and what it has of each
    parameter: {name: (axis, indices)}."""
    mesh, parts = mesh_of(copies, tp=2), {}

    def wrap(module):
        tp.parallelize_module(module, mesh["tp"], tp.plan_of(module))
        parts.update({name: (axis, indices) for name, (_, axis, indices, _) in tp.parts_of(module).items()})
        return hybrid(mesh, 3)(module)
    it = Training("gpt", "adamw", wrap, mesh["replicate", "shard"], batch=7).run(STEPS)
    return it.losses, full_state_dict(it.model), parts


# ---------------------------------------------------------------- counted

class Watch:
    """A hook that writes down what begins and what is through."""

    def __init__(self, events, axis):
        self.events, self.axis = events, axis

    def before(self, op, x, peer):
        self.events.append(("begins", self.axis, op))

    def after(self, op, x, peer):
        self.events.append(("through", self.axis, op))


def counted(copies, stage):
    """A step's traffic by axis and memory, of a float32 model with Adam, after one that isn't counted; and the order of
    what the reductions do."""
    world, mesh, events = comm.world(), mesh_of(copies), []
    it = Training("mlp", "adam", hybrid(mesh, stage), world, "f4").run(1)
    with ledger.record(memory=True) as book:
        it.run(1)
    fast = all(mesh["replicate"].in_window(unit.flat.grads) for unit in it.model.units)
    sent = {key: n for key, n in book.bytes_sent.items() if n and key[0] in mesh.axes}
    for axis in mesh.axes:
        mesh[axis].hooks.append(Watch(events, axis))
    it.run(1)
    it.model.zero_grad()
    return {"units": [unit.size for unit in it.model.units], "sent": sent, "live": dict(book.live), "fast": fast,
            "calls": dict(book.calls), "events": [e for e in events if e[2] in ("reduce_scatter", "all_reduce")]}


# ---------------------------------------------------------------- states

def restored(folder):
    """{way: rank 0's state dict} after three steps and three more, from what another way has saved of the first."""
    world, found = comm.world(), {}
    ways = {"2 copies": hybrid(mesh_of(2), 3), "4 copies": hybrid(mesh_of(4), 1), "1 copy": hybrid(mesh_of(1), 2),
            "ddp": lambda module: DistributedDataParallel(module, world)}

    def begun(way):
        return Training("mlp", "adamw", ways[way], world)

    def goes_on(way, load):
        again = begun(way).run(1)
        load(again)
        again.step, again.batches = 3, (b for epoch in range(99) for b in again.loader.epoch(epoch))
        for _ in range(3):
            next(again.batches)
        again.run(3)
        return again.model.state_dict() if way == "ddp" else full_state_dict(again.model)
    states = {}
    for way in ("2 copies", "ddp"):
        it = begun(way).run(3)
        checkpoints.save(f"{folder}/{way}", it.model, it.optimizer, None, world)
        if way != "ddp":
            states = full_state_dict(it.model), full_optimizer_state_dict(it.model, it.optimizer)
    for source, way in (("2 copies", "1 copy"), ("2 copies", "4 copies"), ("2 copies", "ddp"), ("ddp", "2 copies")):
        found[source, way] = goes_on(way, lambda again, source=source: checkpoints.load(
            f"{folder}/{source}", again.model, again.optimizer, world))

    def load(again):
        again.model.load_state_dict(states[0])
        load_full_optimizer_state_dict(again.model, again.optimizer, states[1])
    found["full", "2 copies"] = goes_on("2 copies", load)
    return found


# ---------------------------------------------------------------- values, gradients, errors

def values():
    """Of models that the ranks have begun from different values: (digest of what was rank 0's, this rank's now)."""
    world, seen = comm.world(), []
    for stage in (1, 2, 3):
        module = net()
        with mt.no_grad():
            for p in module.parameters():
                p.data[...] += world.rank
        first = world.broadcast_object(digest(module.state_dict()))
        model = hybrid(mesh_of(2), stage)(module)
        seen.append((first, whole(model)))
    kept = sparsity(model).rows
    return seen, [(name, count) for name, _, count, _ in kept]


def used_by_some(stage, units, most):
    """(whole gradients on rank 0, unused parameters): only ranks below `most` use layer 1, only the others layer 2."""
    world = comm.world()
    model = hybrid(mesh_of(2), stage, units=units)(Maybe())
    x, ct = batch(world.rank)
    error = said(lambda: (model(x, world.rank < most) * ct).sum().backward())
    return (error, None, None) if error != "nothing" else (error, grads(model), model.unused_parameters)


def scaled():
    """[(whether inf was found, whether the values have changed)]: of a step with inf in one element on the last rank
    alone, and of one without."""
    world, seen = comm.world(), []
    model = hybrid(mesh_of(2), 2)(net())
    optimizer, scaler = optim.SGD(model.parameters(), lr=0.1), optim.GradScaler(init_scale=4.0)
    for bad in (True, False):
        before = whole(model)
        optimizer.zero_grad()
        x, ct = batch(world.rank)
        with np.errstate(all="ignore"):
            y = model(x) * ct
            loss = scaler.scale(y.sum() + (y[0, 0] * float("inf") if bad and world.rank + 1 == world.size else 0.0))
            loss.backward()
            scaler.unscale_(optimizer)
            found = scaler.found_inf(optimizer)
            scaler.step(optimizer)
        scaler.update()
        seen.append((found, whole(model) != before))
    return seen


def raising():
    """{stage: (the error, rank 0's gradients of the next step)}; the exception comes when most units are reduced."""
    found = {}

    def refuse(*_):
        raise ZeroDivisionError("refused")
    for stage in (1, 3):
        model = hybrid(mesh_of(2), stage)(Maybe())
        x, ct = batch(comm.world().rank)
        handle = model.module.layers[0].bias.register_hook(refuse)
        error = said(lambda model=model, x=x, ct=ct: (model(x, True) * ct).sum().backward())
        handle.remove()
        model.zero_grad()
        (model(x, True) * ct).sum().backward()
        found[stage] = error, grads(model)
    return found


def refused():
    """{what: the error} of grids that are none."""
    world = comm.world()
    rank, mesh = world.rank, mesh_of(2)
    both, found = mesh["replicate", "shard"], {}
    groups = {"columns": mesh["replicate"], "unequal": world.split(rank // 3), "mesh": mesh, "a number": 2,
              "outside": world, "turned": world.split(rank // 2, key=-rank),
              "overlapping": world.split(0 if rank in (1, 2) else 1 + (rank == 3)),
              "some": mesh["shard"] if rank else None}
    for what, group in groups.items():
        ranks = mesh["shard"] if what == "outside" else both
        found[what] = said(lambda ranks=ranks, group=group: fully_shard(net(), ranks, shard_over=group))
    found["exact"] = said(lambda: fully_shard(net(), both, shard_over=mesh["shard"], exact=True, micro_shards=2))
    found["backward"] = said(lambda: backward(fully_shard(net(), world, shard_over=world.split(rank // 2))))
    return found
