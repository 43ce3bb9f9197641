"""What the ranks do in the tests of values that neighbours keep between forward and backward. What must hold is checked
by the parent process."""

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, ledger, nn, optim
from minitorch_dist.compress import lora
from minitorch_dist.parallel import MixedPrecisionPolicy, full_state_dict, fully_shard
from minitorch_dist.parallel.pipelines import Pipeline
from minitorch_dist.parallel.pipelines.schedules import one_forward_one_backward
from minitorch_dist.parallel.tensor import parallelize_module

from . import plain
from .sharded_cases import Odd, Training, backward, batch, digest, net, said
from .sharded_use_cases import Checkpoints

SHORT = MixedPrecisionPolicy("bfloat16", "bfloat16", output_dtype="float32")
RUNS = {        # name: (model, optimizer, clip, accumulate, dtype, options of fully_shard)
    "mlp, accumulated": ("mlp", "adam", 0.3, 3, "f8", {}),
    "gpt": ("gpt", "adamw", None, 1, "f4", {}),
    "odd": ("odd", "adamw", 0.3, 1, "f8", {}),
    "16 bits": ("gpt", "adam", None, 2, "f4", {"mp_policy": SHORT}),
    "exact": ("gpt", "adamw", 0.2, 1, "f4", {"exact": True}),
    "LoRA": ("gpt", "adam", None, 1, "f4", {}),
}


def begun(name, reshard, on):
    """A Training of RUNS, before its first step."""
    model, optimizer, _, _, dtype, options = RUNS[name]

    def wrap(module):
        units = {"units": module.units()} if isinstance(module, Odd) else {}
        if name == "LoRA":
            module = lora.add(module, 3, 5)
        return fully_shard(module, on, reshard_after_forward=reshard, **units, **options)
    return Training(model, optimizer, wrap, on, dtype, "exact" in options, batch=18)


def curves(name):
    """[(losses, norms, rank 0's digest after each step)]: as ever, by number, and by the axis of a mesh."""
    mesh, seen = comm.DeviceMesh(node=-1, gpu=2), []
    for reshard, on in ((True, comm.world()), (2, comm.world()), (mesh["gpu"], mesh["node", "gpu"])):
        it = begun(name, reshard, on)

        def watch(it=it):
            state = full_state_dict(it.model)
            it.digests.append(state and digest(state))
        it.run(3, *RUNS[name][2:4], watch=watch)
        seen.append((it.losses, it.norms, it.digests))
    return seen


def checkpointed(reshard):
    """(digest of whole gradients on rank 0, what gathers send by axis, float64 elements of all units): of units that
    forward opens again in backward."""
    model = fully_shard(Checkpoints(mt.checkpoint), comm.world(), reshard_after_forward=reshard)
    for step in range(2):
        model.zero_grad()
        with ledger.record() as book:
            backward(model, step)
    grads = {name: g for unit in model.units for name, g in unit.collect(unit.flat.grads).items()}
    sent = {axis: n for (axis, op), n in book.bytes_sent.items() if op == "all_gather"}
    return grads and digest(grads), sent, sum(unit.size for unit in model.units)


# ---------------------------------------------------------------- counted

def counted(model, group, policy):
    """A step's traffic by axis, and memory, of a float32 model with Adam, after one that isn't counted; and what is
    kept between forward and backward. policy: fully_shard's mp_policy."""
    mesh = comm.DeviceMesh(node=-1, gpu=group)
    both = mesh["node", "gpu"]
    it = Training(model, "adam", lambda module: fully_shard(
        module, both, reshard_after_forward=mesh["gpu"], mp_policy=policy), both, "f4").run(1)
    with ledger.record(memory=True) as book:
        it.run(1)
    it.model.zero_grad()
    shard = next(it.batches).shards[0]
    with ledger.record(memory=True) as between:
        loss = it.model(shard.inputs).sum()
        kept = between.live["buffer"]
        loss.backward()
        del loss
    with ledger.record(memory=True) as read, mt.no_grad():
        it.model(shard.inputs)
    return {"units": [unit.size for unit in it.model.units], "sent": {k: n for k, n in book.bytes_sent.items() if n},
            "live": dict(book.live), "peak": dict(book.peak), "kept": kept, "after": between.live["buffer"],
            "read": {k: n for k, n in read.bytes_sent.items() if n}, "after reading": read.live["buffer"]}


# ---------------------------------------------------------------- other courses of events

def current_values():
    """{what: (digest of values that were seen after something changed them, digest of those that there are)}, on rank
    0; what is left of second shards at the end; and what a backward says whose values were written."""
    world, found = comm.world(), {}
    model = fully_shard(net(), world, reshard_after_forward=2)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    x, ct = batch(world.rank)

    def whole():
        with model.gathered() as module:
            return digest({name: p.numpy() for name, p in module.named_parameters()})

    def refuse(*_):
        raise ZeroDivisionError("refused")

    def note(what, seen):
        state = full_state_dict(model)
        found[what] = seen, state and digest(state)
    backward(model)
    loss = (model(x) * ct).sum()        # a forward that has no backward
    optimizer.step()
    found["too late"] = said(loss.backward)
    note("gathered", whole())
    model(x)
    optimizer.step()
    y, state = model.module[0](x).numpy(), full_state_dict(model)       # a unit by itself
    found["alone"] = state and bool(np.allclose(y, x.numpy() @ state["0.weight"].T + state["0.bias"], atol=1e-12))
    model(x)
    model.load_state_dict({name: value + 1 for name, value in net().state_dict().items()})
    note("loaded", whole())
    handle = model.module[2].register_forward_pre_hook(refuse)
    said(lambda: model(x))
    handle.remove()
    optimizer.step()
    note("raised in forward", whole())
    handle = model.module[0].weight.register_hook(refuse)
    model.zero_grad()
    said(lambda: backward(model))
    handle.remove()
    model.zero_grad()
    backward(model)
    optimizer.step()
    note("raised in backward", whole())
    model(x)
    with mt.no_grad():
        model(x)
    found["left"] = [unit.name for unit in model.units if unit.second is not None or unit.whole is not None]
    return found


def several_passes(reshard):
    """Digests of rank 0's gradients: of two forwards and a backward of their sum, of two backwards of two forwards, of
    a forward with values read between it and its backward."""
    world, found = comm.world(), []
    model = fully_shard(net(), world, reshard_after_forward=reshard)
    (x, ct), (z, dt) = batch(world.rank), batch(world.rank, 1)

    def note():
        grads = {name: g for unit in model.units for name, g in unit.collect(unit.flat.grads).items()}
        found.append(grads and digest(grads))
        model.zero_grad()
    ((model(x) * ct).sum() + (model(z) * dt).sum()).backward()
    note()
    first, second = (model(x) * ct).sum(), (model(z) * dt).sum()
    with model.no_sync():
        first.backward()
    second.backward()
    note()
    loss = (model(x) * ct).sum()
    with model.gathered():
        pass
    with mt.no_grad():
        model(z)
    loss.backward()
    note()
    return found


def refused():
    """{what: the error}."""
    world, found = comm.world(), {}
    mesh, pairs = comm.DeviceMesh(node=2, gpu=2), world.split(world.rank // 2, name="pairs")
    ways = {"three": 3, "one": 1, "none": 0, "columns": mesh["node"], "text": "2", "mesh": mesh, "half": 2.0,
            "beyond a copy": pairs, "unlike": 2 if world.rank else True}
    for what, reshard in ways.items():
        copies = {"shard_over": world.split(world.rank, name="mine")} if what == "beyond a copy" else {}
        found[what] = said(lambda reshard=reshard, copies=copies: fully_shard(
            net(), world, reshard_after_forward=reshard, **copies))
    found["stage 2"] = said(lambda: fully_shard(net(), world, 2, reshard_after_forward=2))
    found["all"] = said(lambda: backward(fully_shard(net(), world, reshard_after_forward=world)))

    def experts():
        mixture = parallelize_module(nn.Sequential(nn.MoE(4, 4, 2)), mesh["gpu"], {"0": "experts"})
        fully_shard(mixture, mesh["node", "gpu"], reshard_after_forward=2)
    found["experts"] = said(experts)

    def pipeline():
        stage = fully_shard(nn.Linear(plain.FEATURES, plain.FEATURES), world, reshard_after_forward=2)
        Pipeline([stage], comm.world_of_one(), one_forward_one_backward(1, 1))
    found["pipeline"] = said(pipeline)
    return found
