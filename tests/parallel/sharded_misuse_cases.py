"""What the ranks do in the tests of fully_shard, where it is misused or used in an odd way."""

import copy
import pickle

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, ledger, nn, optim
from minitorch_dist.parallel import (
    DistributedDataParallel,
    full_optimizer_state_dict,
    full_state_dict,
    fully_shard,
    load_full_optimizer_state_dict,
)

from . import plain
from .sharded_cases import Odd, backward, batch, grads, net, said, sharded


class Scaled(nn.Module):
    """Its factors are read again in a transform's backward."""

    def __init__(self):
        super().__init__()
        self.factors = nn.Parameter(np.arange(4.0))

    def forward(self, x):
        return x * self.factors


def refused():
    """{what: the error}, of models that can't be wrapped and of what can't be done with one."""
    world, found = comm.world(), {}

    def attempt(name, act):
        found[name] = said(act)
    for stage in (1, 2, 3):
        model = fully_shard(net(), world, stage)
        if stage < 3:
            backward(model)
        weight = model.module[0].weight
        for name, act in {
            "an op": lambda w=weight: w * 2, "matmul": lambda w=weight: mt.ones((2, 1200), dtype="f8") @ w,
            "numpy": weight.numpy, "index": lambda w=weight: w[0], "print": lambda w=weight: repr(w),
            "asarray": lambda w=weight: np.asarray(w.data), "pickle": lambda w=weight: pickle.dumps(w.data),
            "copy of its array": lambda w=weight: copy.deepcopy(w.data),
            "module": lambda m=model: m.module(batch(0)[0]), "module state": model.module.state_dict,
            "optimizer": lambda m=model: optim.Adam(m.module.parameters()),
            "copy": lambda m=model: copy.deepcopy(m.module),
        }.items():
            attempt((stage, name), act)
        attempt((stage, "state"), model.state_dict)
        attempt((stage, "deepcopy all"), lambda m=model: copy.deepcopy(m))
        sgd = optim.SGD(model.parameters())
        attempt((stage, "optimizer copied"), lambda o=sgd: copy.deepcopy(o))
        attempt((stage, "optimizer pickled"), lambda o=sgd: pickle.dumps(o))
        attempt((stage, "ddp"), lambda m=model: DistributedDataParallel(m, world))
        attempt((stage, "ddp inside"), lambda m=model: DistributedDataParallel(m.module, world))
        attempt((stage, "twice"), lambda m=model: fully_shard(m, world))
        attempt((stage, "to"), lambda m=model: m.to("float32"))
    inner = net()
    optim.Adam(inner.parameters())
    attempt("optimizer before", lambda: fully_shard(inner, world))
    attempt("stage", lambda: fully_shard(net(), world, 4))
    attempt("stranger", lambda: fully_shard(net(), world, units=[nn.Linear(2, 2)]))
    held = nn.Sequential(nn.ModuleList([nn.Linear(2, 2)]))
    attempt("never called", lambda: fully_shard(held, world, units=[held[0]]))
    frozen = net()
    for p in frozen.parameters():
        p.requires_grad_(False)
    attempt("nothing to train", lambda: fully_shard(frozen, world))
    attempt("half", lambda: fully_shard(nn.Linear(3, 3, dtype="f2"), world))
    attempt("stages differ", lambda: fully_shard(net(), world, 1 + world.rank))
    attempt("dtypes differ", lambda: fully_shard(nn.Linear(3, 3, dtype="f2" if world.rank else "f4"), world))
    exact = fully_shard(net(), world, exact=True)
    attempt("no_sync", lambda: exact.no_sync().__enter__())
    changed = fully_shard(net(), world)
    changed.module.add_module("3", nn.Linear(5, 5))
    attempt("changed", lambda: backward(changed))
    half = fully_shard(Odd(np.dtype("f8")), world)
    half.module.first.bias.requires_grad_()
    attempt("thawed", lambda: backward(half))
    model = fully_shard(net(), world)
    attempt("names", lambda: model.load_state_dict(net()[0].state_dict() if world.rank == 0 else None))
    attempt("lists", lambda: model.load_state_dict(
        {name: value.tolist() for name, value in net().state_dict().items()} if world.rank == 0 else None))
    attempt("no names", lambda: model.load_state_dict([1] if world.rank == 0 else None))
    adam = optim.Adam(model.parameters())
    small = optim.Adam(net()[0].parameters())
    attempt("optimizer state", lambda: load_full_optimizer_state_dict(
        model, adam, small.state_dict() if world.rank == 0 else None))
    attempt("optimizer state of lists", lambda: load_full_optimizer_state_dict(
        model, adam, adam.state_dict() | {"state": [{"exp_avg": [0.0]}]} if world.rank == 0 else None))
    scaled = fully_shard(nn.Sequential(Scaled()), world)
    attempt("mt.grad around it", lambda: mt.grad(lambda x: mt.sum(scaled(x)))(np.ones(4)))
    with scaled.gathered():
        attempt("mt.grad inside gathered", lambda: np.testing.assert_array_equal(
            mt.grad(lambda x: mt.sum(scaled(x)))(np.ones(4)).numpy(), np.arange(4.0)))
    copies = DistributedDataParallel(net(), world)
    attempt("state of copies", lambda: full_state_dict(copies))
    attempt("optimizer state of copies", lambda: full_optimizer_state_dict(copies, adam))
    attempt("optimizer state into copies", lambda: load_full_optimizer_state_dict(copies, adam, {}))
    backward(model)
    for how, copied in ("copied", copy.deepcopy), ("pickled", lambda pieces: pickle.loads(pickle.dumps(pieces))):
        for name, act in {
            "clip": lambda params: optim.clip_grad_norm_(params, 1.0), "LAMB": optim.LAMB, "LARS": optim.LARS,
            "Muon": lambda params: optim.Muon(params[0]), "Adafactor": optim.Adafactor,
            "SGD": lambda params: optim.SGD(params).step(),
            "LAMB, laid out": lambda params: (optim.SGD(params), optim.LAMB(params)),
            "GradScaler": lambda params: optim.GradScaler().unscale_(optim.SGD(params)),
        }.items():
            attempt((how, name), lambda act=act, copied=copied: act(copied(list(model.parameters()))))
    return found


class Returns(nn.Module):
    """Gives its parameter, or something of it, away."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(np.ones((5, 4)))

    def forward(self, how):
        return {"itself": lambda: self.table, "view": lambda: {"a": [self.table[1:].reshape((2, 8))]},
                "copy": lambda: self.table * 1}[how]()


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = Returns()

    def forward(self, how):
        return self.part(how)


def in_use():
    """{what: the error, or the gradients on rank 0} of steps that are used in an odd way, in stage 3 and in others."""
    world, found = comm.world(), {}
    holder = Holder()
    model = fully_shard(holder, world, units=[holder.part])
    for how in ("itself", "view", "copy"):
        found[how] = said(lambda how=how: model(how) * 1 if how == "itself" else model(how))
    model = sharded("3", world)(Odd(np.dtype("f8")))
    with ledger.record(memory=True) as book:
        loss = model(batch(world.rank)[0]).sum()
        found["held by the tape"] = book.live["buffer"], book.peak["buffer"], loss.item()
    for stage in (1, 2, 3):
        model = fully_shard(net(), world, stage)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        backward(model)
        found[stage, "usual"] = grads(model)
        found[stage, "summed twice"] = said(lambda m=model: backward(m))
        model.zero_grad()
        backward(model)
        found[stage, "and then"] = grads(model)
        # a step between a forward and its backward
        model.zero_grad()
        x, ct = batch(world.rank)
        loss = (model(x) * ct).sum()
        for p in model.parameters():
            p.grad = mt.ones(p.shape, dtype="f8")
        optimizer.step()
        found[stage, "stale"] = said(loss.backward)
        # the optimizer's step after an evaluation that came between backward and it
        model = fully_shard(net(), world, stage)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        backward(model)
        with mt.no_grad():
            model(x)
        optimizer.step()
        model.zero_grad()
        found[stage, "step after evaluation"] = said(lambda m=model: backward(m))
        if stage == 3:      # the same, recorded, of values that would be kept
            seen = []
            for kept in (False, True):
                model = fully_shard(net(), world, stage, reshard_after_forward=not kept)
                optimizer = optim.SGD(model.parameters(), lr=0.1)
                backward(model)
                if kept:
                    model(x)
                optimizer.step()
                model.zero_grad()
                backward(model)
                seen.append(grads(model))
            found["step after a forward"] = seen
        # create_graph, a hook that replaces a gradient, backward twice through one graph
        model = fully_shard(net(), world, stage)
        loss = (model(x) * ct).sum()
        found[stage, "create_graph"] = said(lambda loss=loss: loss.backward(create_graph=True))
        model = fully_shard(net(), world, stage)
        model.module[2].weight.register_post_accumulate_grad_hook(
            lambda t: setattr(t, "grad", mt.tensor(2 * t.grad.numpy())))
        for _ in range(2):
            model.zero_grad()
            backward(model)
        found[stage, "doubled"] = grads(model)
        model = fully_shard(net(), world, stage)
        loss = (model(x) * ct).sum()
        loss.backward(retain_graph=True)
        model.zero_grad()
        loss.backward()
        found[stage, "backward twice"] = grads(model)
        # two forwards, one backward
        model.zero_grad()
        (((model(x) * ct).sum() + (model(x) * ct).sum()) * 0.5).backward()
        found[stage, "two forwards"] = grads(model)
        # checkpoints of a unit, of several, of the whole model
        for what in ("unit", "all"):
            model = fully_shard(Checkpointed(what), world, stage)
            (mt.checkpoint(model) if what == "all" else model)(x).__mul__(ct).sum().backward()
            found[stage, "checkpointed " + what] = grads(model)
        # hooks of the user's around it
        model = fully_shard(net(), world, stage)
        with mt.saved_tensors_hooks(lambda a: a.copy(), lambda a: a):
            loss = (model(x) * ct).sum()
        loss.backward()
        found[stage, "hooks around"] = grads(model)
        with model.gathered() as whole:
            found[stage, "gathered"] = {n: p.numpy().copy() for n, p in whole.named_parameters()}, \
                said(lambda m=model, x=x: m(x))

        def write(model=model):
            with model.gathered(), mt.no_grad():
                model.module[0].weight[0] = 1.0
        found[stage, "gathered and written"] = said(write)
    return found


class Checkpointed(nn.Module):
    """net(), with its second half checkpointed where asked for."""

    def __init__(self, what):
        super().__init__()
        self.what, self.layers = what, net()

    def forward(self, x):
        x = mt.tanh(self.layers[0](x))
        return (mt.checkpoint(self.layers[2]) if self.what == "unit" else self.layers[2])(x)


def raising():
    """{(stage, where an exception came): (errors, the gradients of the next step on rank 0)}."""
    world, found = comm.world(), {}

    def refuse(*_):
        raise ZeroDivisionError("refused")
    for stage in (1, 2, 3):
        for where in ("forward", "backward", "first gradient", "no_sync", "first of no_sync", "forward in no_sync"):
            model = fully_shard(net(), world, stage)
            backward(model)     # so that orders are known, and units gathered ahead
            model.zero_grad()
            broken = {"forward": lambda m=model: m.module[2].register_forward_pre_hook(refuse),
                      "backward": lambda m=model: m.module[0].bias.register_post_accumulate_grad_hook(refuse),
                      "first gradient": lambda m=model: m.module[2].bias.register_hook(refuse)}
            errors = []
            if where == "forward in no_sync":
                with model.no_sync():
                    backward(model)
                handle = broken["forward"]()
                errors.append(said(lambda m=model: backward(m, 1)))
                handle.remove()
            elif where.endswith("no_sync"):
                with model.no_sync():
                    if where == "no_sync":
                        backward(model)
                    handle = broken["backward"]()
                    errors.append(said(lambda m=model: backward(m, 1)))
                    handle.remove()
                errors.append(said(lambda m=model: backward(m, 2)))
                model.zero_grad()
                with model.no_sync():
                    backward(model)
            else:
                handle = broken[where]()
                errors.append(said(lambda m=model: backward(m, 1)))
                handle.remove()
                model.zero_grad()
                with model.no_sync():
                    backward(model)
            backward(model, 3)
            alive = [unit.name for unit in model.units if unit.users or stage == 3 and unit.whole is not None]
            found[stage, where] = errors, grads(model), alive
    return found


def half_a_step():
    """Exact mode, 4 micro-shards per rank: (the error of zero_grad() after two of them, the step's gradients then,
    after forget_step(), and after a backward that has raised)."""
    world, found = comm.world(), []
    for stage in (1, 2, 3):
        model = fully_shard(net(), world, stage, exact=True, micro_shards=4 * world.size)

        def step(first, passes=4, model=model):
            for k in range(passes):
                backward(model, first + k)
        step(0, 2)
        model.zero_grad()
        error = said(lambda step=step: step(10))
        step(10)
        after = grads(model)
        model.zero_grad()
        step(20, 3)
        model.forget_step()
        step(20)
        forgotten = grads(model)
        model.zero_grad()
        step(30, 2)
        handle = model.module[0].bias.register_post_accumulate_grad_hook(lambda _: 1 / 0)
        raised = said(lambda step=step: step(32))
        handle.remove()
        step(30)
        found.append((error, after, forgotten, raised, grads(model)))
    return found


def used_by_some(stage):
    """Rank 0 alone uses a layer, which in the step before rank 1 alone has used: the gradients on rank 0, and the names
    that nobody has used. Then twice no rank does, at last after a backward that has used it and raised: [(the names
    then, those without a gradient)]."""
    world = comm.world()
    model = fully_shard(Maybe(), world, stage)
    x, ct = batch(world.rank)
    for user in (1, 0):
        model.zero_grad()
        (model(x, world.rank == user) * ct).sum().backward()
    seen, later = (grads(model), model.unused_parameters), []
    for raises in (False, True):
        model.zero_grad()
        if raises:
            handle = model.module.layers[0].bias.register_post_accumulate_grad_hook(lambda _: 1 / 0)
            assert "ZeroDivisionError" in said(((model(x, True) + model(x, False)) * ct).sum().backward)
            handle.remove()
            model.zero_grad()
        (model(x, False) * ct).sum().backward()
        later.append((model.unused_parameters, [name for name, p in model.named_parameters() if p.grad is None]))
    return *seen, later


class Maybe(nn.Module):
    def __init__(self):
        super().__init__()
        mt.manual_seed(4)
        self.layers = nn.Sequential(nn.Linear(plain.FEATURES, 8, dtype="f8"), nn.Linear(8, 8, dtype="f8"),
                                    nn.Linear(8, 8, dtype="f8"), nn.Linear(8, plain.CLASSES, dtype="f8"))

    def forward(self, x, more):
        a, b, c, d = self.layers
        return d(b(a(x)) if more else c(a(x)))


def alone(module, forward, ranks, steps=(0,)):
    """{name: gradient} of the module's, added up over all ranks' batches, in one process."""
    for rank in ranks:
        for step in steps:
            x, ct = batch(rank, step)
            (forward(module, x, rank) * ct).sum().backward()
    return {name: p.grad.numpy() for name, p in module.named_parameters() if p.grad is not None}
