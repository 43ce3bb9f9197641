"""What the ranks do in the tests of fully_shard: values after each step, checkpoints inside units, hooks on pieces."""

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, ledger, nn, optim
from minitorch_dist.parallel import full_state_dict, fully_shard

from . import plain
from .sharded_cases import backward, batch, grads, net, said
from .sharded_misuse_cases import alone


class Catches(nn.Module):
    """A unit that raises when it runs first, which the model takes calmly."""

    def __init__(self):
        super().__init__()
        mt.manual_seed(6)
        self.part, self.last = Refusing(), nn.Linear(plain.FEATURES, plain.CLASSES, dtype="f8")

    def forward(self, x):
        try:
            x = self.part(x, refuse=True)
        except ZeroDivisionError:
            x = self.part(x, refuse=False)
        return self.last(x)


class Refusing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(plain.FEATURES, plain.FEATURES, dtype="f8")

    def forward(self, x, refuse):
        if refuse:
            raise ZeroDivisionError
        return self.layer(x)


def current_values():
    """{what: (values that were seen after the optimizer's steps, full_state_dict's)} of stage 3, on rank 0."""
    world, found = comm.world(), {}

    def refuse(*_):
        raise ZeroDivisionError("refused")

    def whole(model):
        with model.gathered() as module:
            return {name: p.numpy().copy() for name, p in module.named_parameters()}
    for kept in (False, True):
        model = fully_shard(net(), world, reshard_after_forward=not kept)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        backward(model)
        x, _ = batch(world.rank)
        model(x)        # whose values are kept, or gathered ahead
        optimizer.step()
        found["gathered", kept] = whole(model), full_state_dict(model)
        model(x)
        optimizer.step()
        y, state = model.module[0](x).numpy(), full_state_dict(model)
        found["a unit by itself", kept] = {"y": y}, state and {"y": x.numpy() @ state["0.weight"].T + state["0.bias"]}
        model(x)
        other = {name: value + 1 for name, value in net().state_dict().items()}
        model.load_state_dict(other)
        found["loaded", kept] = whole(model), other
        handle = model.module[2].register_forward_pre_hook(refuse)
        said(lambda m=model, x=x: m(x))
        handle.remove()
        optimizer.step()
        found["raised", kept] = whole(model), full_state_dict(model)

        def raises(model=model):
            with model.gathered():
                refuse()
        said(raises)
        found["closed", kept] = said(model.module[0].weight.numpy)
        optimizer.step()
        found["raised inside", kept] = whole(model), full_state_dict(model)
        with model.gathered():
            model.zero_grad()
            backward(model)
            optimizer.step()
            found["stepped inside", kept] = said(lambda m=model, x=x: m(x))
    model, usual = Catches(), Catches()
    model = fully_shard(model, world, units=[model.part, model.last])
    sharded_optimizer, optimizer = (optim.SGD(m.parameters(), lr=0.1) for m in (model, usual))
    for step in range(2):
        model.zero_grad()
        backward(model, step)
        sharded_optimizer.step()
        optimizer.zero_grad()
        alone(usual, lambda m, x, rank: m(x), range(world.size), (step,))
        optimizer.step()
    found["caught", False] = full_state_dict(model), usual.state_dict()
    model(x)
    found["alive"] = [unit.name for unit in model.units if unit.users or unit.whole is not None]
    return found


class Checkpoints(nn.Module):
    """net() between two layers, of which one belongs to no unit and the other to one; both are checkpointed parts."""

    def __init__(self, checkpoint):
        super().__init__()
        mt.manual_seed(8)
        self.first = nn.Linear(plain.FEATURES, plain.FEATURES, dtype="f8")
        self.layers = nn.Sequential(Around(checkpoint), net())
        self.checkpoint = checkpoint

    def forward(self, x):
        return self.layers(self.checkpoint(lambda x: x @ self.first.weight + self.first.bias)(x))


class Around(nn.Module):
    def __init__(self, checkpoint):
        super().__init__()
        self.up, self.down = nn.Linear(plain.FEATURES, 30, dtype="f8"), nn.Linear(30, plain.FEATURES, dtype="f8")
        self.checkpoint = checkpoint

    def forward(self, x):
        twice = self.checkpoint(lambda x: self.checkpoint(self.down)(mt.tanh(self.up(x))))
        return x + twice(x)


def pieces_in_use():
    """{(stage, what): …} of what users do to parameters(): hooks, freezing, forgetting some gradients; and of parts of
    units in checkpoints, and summary()."""
    world, found = comm.world(), {}
    x, _ = batch(world.rank)
    for stage in (1, 2, 3):
        model = fully_shard(Checkpoints(mt.checkpoint), world, stage)
        for _ in range(2):      # the second with values gathered ahead
            model.zero_grad()
            backward(model)
        found[stage, "checkpoints"] = grads(model)
        model.zero_grad()
        with ledger.record(memory=True) as book:
            loss = model(x).sum()
            found[stage, "held"] = book.live["buffer"]
        model = fully_shard(Around(mt.checkpoint), world, stage)
        optimizer, loss = optim.SGD(model.parameters(), lr=0.1), model(x).sum()
        for p in model.parameters():
            p.grad = mt.ones(p.shape, dtype="f8")
        optimizer.step()
        if world.size == 1:     # else a rank has none of this small unit, and another one's error is the job's
            found[stage, "checkpoints of old values"] = said(loss.backward)
        model, seen = fully_shard(net(), world, stage), []
        pieces = dict(model.named_parameters())
        pieces["0.bias"].register_hook(lambda g: g * 3)
        pieces["2.bias"].register_post_accumulate_grad_hook(
            lambda p, pieces=pieces, seen=seen: seen.append([q.grad is not None for q in pieces.values()]))
        pieces["0.weight"].requires_grad_(False)
        backward(model)
        found[stage, "hooked"] = grads(model), seen, pieces["0.weight"].grad is None
        found[stage, "no_sync"] = said(lambda m=model: within(m, 1))
        model.zero_grad()
        within(model, 0)
        for name in ("0.weight", "0.bias"):
            pieces[name].grad = None
        found[stage, "zeroed in part"] = said(lambda m=model: backward(m))
        model = fully_shard(net(), world, stage, units=[])
        a, b = optim.SGD([*model.parameters()][:2], 0.1), optim.SGD([*model.parameters()][2:], 0.1)
        within(model, 0)
        b.zero_grad()
        found[stage, "zeroed by one of two"] = said(lambda m=model: backward(m))
        model.zero_grad()
        within(model, 0)
        a.zero_grad()
        b.zero_grad()
        backward(model)
        found[stage, "zeroed by both"] = grads(model)
        found[stage, "summary"] = str(nn.summary(fully_shard(net(), world, stage), x)) == str(nn.summary(net(), x))
    return found


def a_step_too_late(stage):
    """Of each kind of optimizer, whether this rank is told that an evaluation came between backward and step. The
    second rank has no piece of so small a model."""
    world, told = comm.world(), []
    for make in (lambda p: optim.SGD(p, 0.1), lambda p: optim.AdamW(p, 0.1), lambda p: optim.Muon(p, 0.1)):
        model = fully_shard(nn.Sequential(nn.Linear(5, 3, bias=False)), world, stage)
        optimizer, x = make(model.parameters()), mt.ones(4, 5)
        mt.sum(model(x) ** 2.0).backward()
        with mt.no_grad():
            model(x)
        optimizer.step()
        told.append(said(lambda m=model, x=x: m(x)))
    return told, [p.size for p in model.parameters()]


def a_step_of_nothing(stage):
    """(Parameters after three steps, of which the second has a forward, and no backward; those of one process)."""
    world, found = comm.world(), []
    for sharded in (True, False):
        mt.manual_seed(3)
        module = nn.Sequential(nn.Linear(5, 3, dtype="f8"), nn.Linear(3, 3, dtype="f8"))
        model = fully_shard(module, world, stage) if sharded else module
        optimizer = optim.AdamW(model.parameters(), 0.1)
        for step in range(3):
            optimizer.zero_grad()
            loss = (model(mt.ones(4, 5, dtype="f8")) ** 2).sum() / (world.size if sharded else 1)
            if step != 1:
                loss.backward()
            optimizer.step()
        found.append(full_state_dict(model) if sharded else module.state_dict())
    return found


def within(model, step):
    with model.no_sync():
        backward(model, step)


def penalised(stage):
    """({how the penalty comes into the gradient: full_state_dict after two steps}, what one process has, what is said
    of sums that are there, and of pieces with either kind of hook), of a loss and a penalty on all parameters."""
    world, found = comm.world(), {}
    x = np.random.default_rng(7).standard_normal((6, 5))
    here = x[6 * world.rank // world.size:6 * (world.rank + 1) // world.size]

    def build():
        mt.manual_seed(3)
        return nn.Sequential(nn.Linear(5, 7, dtype="f8"), nn.Tanh(), nn.Linear(7, 3, dtype="f8"))

    def losses(model, x):
        return (model(x) ** 2).sum() / 6, 0.05 * sum((p ** 2).sum() for p in model.parameters())

    def steps(model, x, way):
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            way(*losses(model, x))
            optimizer.step()
        return model
    for name, way in {"one": lambda loss, penalty: (loss + penalty).backward(),
                      "penalty first on the tape": lambda loss, penalty: (penalty + loss).backward(),
                      "two": lambda loss, penalty: (loss.backward(), penalty.backward()),
                      "penalty before": lambda loss, penalty: (penalty.backward(), loss.backward())}.items():
        found[name] = full_state_dict(steps(fully_shard(build(), world, stage), here, way))
    whole = steps(build(), x, lambda loss, penalty: (loss + penalty).backward()).state_dict()
    model = fully_shard(build(), world, stage)
    sum(losses(model, here)).backward()
    stale = said(lambda: sum(losses(model, here)).backward())
    told = []
    for kind in ("register_hook", "register_post_accumulate_grad_hook"):
        hooked = fully_shard(build(), world, stage)
        for p in hooked.parameters():
            getattr(p, kind)(lambda seen: None)
        told.append(said(sum(losses(hooked, here)).backward))
    return found, whole, stale, told
