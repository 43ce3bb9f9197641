"""What the ranks do in the tests of what fully_shard sends in 8 and 4 bits. What must hold is checked by the parent
process, which rounds by hand."""

import numpy as np

import minitorch_dist as mt
from minitorch_dist import backend, comm, data, nn, optim, training
from minitorch_dist.compress import lora
from minitorch_dist.parallel import MixedPrecisionPolicy, full_state_dict, fully_shard
from minitorch_dist.parallel.encodings import E3M0, Blocks

from . import near_cases, plain
from .policy_cases import LR, STEPS, batches, loss_of, mlp
from .sharded_cases import Training, digest, said

POLICIES = {
    "values": MixedPrecisionPolicy(param_encoding=Blocks(8)),
    "gradients": MixedPrecisionPolicy(reduce_encoding=Blocks(4)),
    "both": MixedPrecisionPolicy(param_encoding=Blocks(8), reduce_encoding=Blocks(4)),
    "16 bits": MixedPrecisionPolicy("bfloat16", "bfloat16", "float32", True, Blocks(8), Blocks(4)),
    "small blocks": MixedPrecisionPolicy(param_encoding=Blocks(4, 32), reduce_encoding=Blocks(8, 64)),
}


# ---------------------------------------------------------------- by hand

def rounded(values, encoding):
    """A flat array as `encoding` gives it back, found by looking at all levels of every block. Between two, where some
    sums of few levels lie, it is the even one."""
    if encoding is None:
        return values
    most, out = 2 ** (encoding.bits - 1) - 1, np.zeros_like(values)
    levels = np.array(sorted(range(-most, most + 1), key=lambda k: k % 2), np.float32)
    for start in range(0, len(values), encoding.size):
        block = values[start:start + encoding.size]
        scale = np.abs(block).max() / np.float32(most) or np.float32(1)
        out[start:start + encoding.size] = levels[np.abs((block / scale)[:, None] - levels).argmin(axis=1)] * scale
    return out


def by_unit(values, change):
    """{name: array} of a model of Linears, each of which is a unit: change(flat), weight and bias padded to 16."""
    out = {}
    for layer in sorted({name.rpartition(".")[0] for name in values}):
        names, flat, places = [f"{layer}.weight", f"{layer}.bias"], [], []
        for name in names:
            places.append(sum(map(len, flat)))
            flat += [values[name].ravel(), np.zeros(-values[name].size % 16, values[name].dtype)]
        changed = change(np.concatenate(flat))
        for name, place in zip(names, places, strict=True):
            out[name] = changed[place:place + values[name].size].reshape(values[name].shape)
    return out


def by_hand(policy, ranks, group, stages=STEPS):
    """[state dict after each step] of SGD on float32 values: what the ranks do, made one after the other. group: the
    neighbours among which gradients are summed first; None: all at once."""
    policy = POLICIES[policy]
    values_in, sent_in = (backend.as_dtype(name or "float32") for name in (policy.param_dtype, policy.reduce_dtype))
    masters, states = {name: p.numpy().copy() for name, p in mlp().named_parameters()}, []
    for shards in zip(*(batches(rank, ranks) for rank in range(ranks)), strict=True):
        used = by_unit(masters, lambda flat: rounded(flat, policy.param_encoding))
        sent = []
        for _, batch in shards:
            model = mlp(values_in)
            model.load_state_dict({name: value.astype(values_in) for name, value in used.items()})
            for shard in batch.shards:
                x = shard.inputs.astype(values_in)
                loss = nn.cross_entropy(model(x).astype("float32"), shard.labels, reduction="sum") / batch.count
                loss.backward()
            sent.append(by_unit({name: p.grad.numpy().astype(sent_in).astype("f4")
                                 for name, p in model.named_parameters()},
                                lambda flat: rounded(flat, policy.reduce_encoding)))
        if group is not None:
            sent = [by_unit(in_order(sent[first:first + group]), lambda flat: rounded(flat, policy.reduce_encoding))
                    for first in range(0, ranks, group)]
        for name, gradient in in_order(sent).items():
            masters[name] -= np.float32(LR) * gradient
        states.append({name: value.copy() for name, value in masters.items()})
    return states


def in_order(several):
    """The sum of {name: array}s."""
    total = {name: np.zeros_like(value) for name, value in several[0].items()}
    for each in several:
        for name, value in each.items():
            total[name] += value
    return total


def trained(policy, group):
    """([rank 0's state dict after each step], the values that the module had last)."""
    world = comm.world()
    model = fully_shard(mlp(), world, reshard_after_forward=group, mp_policy=POLICIES[policy])
    optimizer, states = optim.SGD(model.parameters(), lr=LR), []
    for step, batch in batches(world.rank, world.size):
        training.train_step(model, optimizer, batch, loss_of, world, seed=1, step=step)
        states.append(full_state_dict(model))
    with model.gathered() as module:
        return states, {name: p.numpy().astype("f4") for name, p in module.named_parameters()}


# ---------------------------------------------------------------- other ways

def exact_digests():
    """Rank 0's digests after steps in exact mode with values of 8 bits; with hpZ too, where there are groups."""
    from threadpoolctl import threadpool_limits
    threadpool_limits(1)
    world, found = comm.world(), []
    for group in (True, 2) if world.size > 2 else (True,):
        def wrap(module, group=group):
            return fully_shard(module, world, reshard_after_forward=group, exact=True, mp_policy=POLICIES["values"])
        it = Training("gpt", "adamw", wrap, world, "f4", True, 18)
        found.append([])

        def watch(it=it):
            state = full_state_dict(it.model)
            found[-1].append(state and digest(state))
        it.run(2, watch=watch)
    return found


def summed(stage, group):
    """Digests of rank 0's gradients: of the loss of two batches, and of one after the other, the first without sum."""
    world, found = comm.world(), []
    x, labels = plain.dataset()
    mine = [slice(start + 3 * world.rank, start + 3 * world.rank + 3) for start in (0, 30)]
    model = fully_shard(mlp(), world, stage, reshard_after_forward=group, mp_policy=POLICIES["gradients"])
    for apart in (False, True):
        losses = [nn.cross_entropy(model(x[part].astype("f4")), labels[part], reduction="sum") for part in mine]
        if apart:
            with model.no_sync():
                losses[1].backward()
            losses[0].backward()
        else:
            (losses[0] + losses[1]).backward()
        grads = {name: g for unit in model.units for name, g in unit.collect(unit.flat.grads).items()}
        found.append(grads and digest(grads))
        model.zero_grad()
    return found


def counted(group, policy):
    """near_cases.counted of a GPT."""
    return near_cases.counted("gpt", group, POLICIES[policy])


def learned(steps, seeds):
    """The losses of GPTs that learn to count, by ones and by threes, mean of these initial values: in stage 3, and with
    all of ZeRO++."""
    world, found = comm.world(), []
    tokens = np.random.default_rng(3).integers(0, 4, (64, 1)) + np.arange(7) * np.array([[1], [3]]).repeat(32, 0)
    tokens %= 17

    def loss_sum(model, shard):
        return nn.cross_entropy(model(shard.inputs).reshape((-1, 17)), shard.labels.reshape(-1), reduction="sum")
    for policy, group in ((None, True), ("16 bits", 2)):
        curves = []
        for seed in seeds:
            mt.manual_seed(seed)
            model = fully_shard(nn.GPT(17, 6, layers=2, heads=4, dim=36), world, reshard_after_forward=group,
                                mp_policy=policy and POLICIES[policy])
            optimizer = optim.Adam(model.parameters(), lr=0.01)
            loader = data.Loader(tokens[:, :-1], tokens[:, 1:], 16, seed=2, rank=world.rank, size=world.size)
            stream = (b for epoch in range(steps) for b in loader.epoch(epoch))
            curves.append([training.train_step(model, optimizer, next(stream), loss_sum, world, seed=1, step=step,
                                               units=6)[0] for step in range(steps)])
        found.append(np.mean(curves, 0).tolist())
    return found


def frozen():
    """(what travels as it is: whether frozen values are the pieces' to the bit and trained ones aren't, the losses)."""
    world = comm.world()
    it = Training("gpt", "adam", lambda module: fully_shard(
        lora.add(module, 3, 5), world, reshard_after_forward=2, mp_policy=POLICIES["both"]), world, "f4").run(3)
    state = world.broadcast_object(full_state_dict(it.model))
    with it.model.gathered() as module:
        same = {name: np.array_equal(p.numpy(), state[name]) for name, p in module.named_parameters()}
        trained = {name for name, p in module.named_parameters() if p.requires_grad}
    return {same[name] for name in same if name not in trained}, {same[n] for n in trained if state[n].any()}, it.losses


def with_inf():
    """[(whether inf was found, whether the values have changed)]: of a step with inf in one element on the last rank
    alone, and of one without."""
    world, seen = comm.world(), []
    x, labels = plain.dataset()
    model = fully_shard(mlp(), world, reshard_after_forward=2, mp_policy=POLICIES["both"])
    optimizer, scaler = optim.SGD(model.parameters(), lr=0.1), optim.GradScaler(init_scale=4.0)
    for bad in (True, False):
        before = [p.numpy().copy() for p in model.parameters()]
        model.zero_grad()
        with np.errstate(all="ignore"):
            y = model(x[:4].astype("f4"))
            loss = nn.cross_entropy(y, labels[:4]) + (y[0, 0] * float("inf") if bad and world.rank == 3 else 0.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            found = scaler.found_inf(optimizer)
            scaler.step(optimizer)
        scaler.update()
        moved = any(not np.array_equal(p.numpy(), old) for p, old in zip(model.parameters(), before, strict=True))
        seen.append((bool(found), any(world.all_gather_object(moved))))
    return seen


def on_a_gpu():
    """Whether a training on the stand-in for a GPU has the host's bits."""
    from tests.device.fake_cupy import installed
    world, states = comm.world(), []
    with installed():
        for device in ("cpu", "cuda"):
            model = fully_shard(mlp().to(device), world, mp_policy=POLICIES["both"])
            optimizer = optim.SGD(model.parameters(), lr=LR)
            for step, batch in batches(world.rank, world.size):
                training.train_step(model, optimizer, batch, loss_of, world, seed=1, step=step)
            state = full_state_dict(model)
            states.append(state and digest(state))
    return states[0] == states[1], {p.device[:4] for p in model.parameters()}


def refused():
    """{what: the error}."""
    world = comm.world()
    ways = {"exact": lambda: fully_shard(mlp(), world, exact=True, mp_policy=POLICIES["gradients"]),
            "stage 2": lambda: fully_shard(mlp(), world, 2, mp_policy=POLICIES["values"]),
            "float64": lambda: fully_shard(mlp("f8"), world, mp_policy=POLICIES["gradients"]),
            "unlike": lambda: fully_shard(mlp(), world, mp_policy=POLICIES["both" if world.rank else "values"]),
            "drawn": lambda: MixedPrecisionPolicy(reduce_encoding=E3M0()),
            "size": lambda: MixedPrecisionPolicy(param_encoding=Blocks(8, 96)), "bits": lambda: Blocks(5),
            "odd": lambda: Blocks(4, 33)}
    return {what: said(act) for what, act in ways.items()}
