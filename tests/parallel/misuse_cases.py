"""What the ranks do in the tests of what DistributedDataParallel refuses, or must get right all the same."""

import copy
import pickle
from contextlib import nullcontext

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, nn
from minitorch_dist.parallel import DistributedDataParallel

from .ddp_cases import grads_of


def net(*layers):
    mt.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5, dtype=np.float64), nn.Tanh(), *layers, nn.Linear(5, 3, dtype=np.float64))


def wrapped(*layers, **options):
    return DistributedDataParallel(net(*layers), comm.world(), **options)


def data(part, step=0):
    random = np.random.default_rng([21, part, step])
    return random.standard_normal((3, 4)), random.standard_normal((3, 3))


def backward(model, part, step=0, **options):
    x, ct = data(part, step)
    (model(mt.tensor(x)) * ct).sum().backward(**options)


def alone(parts, step=0):
    """{name: gradient} by one process without the wrapper."""
    model = net()
    for part in parts:
        backward(model, part, step)
    return grads_of(model)


def error(act):
    try:
        act()
    except (RuntimeError, TypeError, ValueError) as found:
        return str(found)
    return "nothing"


# ---------------------------------------------------------------- steps left half-way in exact mode

def half_a_step():
    """4 micro-shards per rank, of which a first step ran 2: (the error, gradients of the step after, of one after
    forget_step())."""
    world = comm.world()
    model = wrapped(exact=True, micro_shards=4 * world.size)
    parts = range(4 * world.rank, 4 * world.rank + 4)

    def step(number, passes=4):
        for p in model.parameters():        # as an optimizer does
            p.grad = None
        for part in parts[:passes]:
            backward(model, part, number)
    step(0, passes=2)
    said = error(lambda: step(1))
    step(1)
    after = grads_of(model)
    step(2, passes=3)
    model.forget_step()
    step(2)
    return said, after, grads_of(model)


def one_rank_gives_up():
    """Rank 0 begins a step anew: all ranks' gradients."""
    world = comm.world()
    model = wrapped(exact=True, micro_shards=2 * world.size)
    if world.rank == 0:
        backward(model, 9)
        model.forget_step()
    for part in (2 * world.rank, 2 * world.rank + 1):
        backward(model, part)
    return grads_of(model)


# ---------------------------------------------------------------- models that changed

def exchanged():
    """{what was done after wrapping: the error of the next forward}."""
    def weight(model):
        model.module[0].weight = nn.Parameter(np.zeros((5, 4)))

    def layer(model):
        model.module.add_module("2", nn.Linear(5, 3, dtype=np.float64))

    def more(model):
        model.module[1].scale = nn.Parameter(np.ones(1))

    def bias(model):
        model.module[2].bias = None
    said = {}
    for act in (weight, layer, more, bias):
        model = wrapped()
        backward(model, 0)
        act(model)
        model.zero_grad()
        said[act.__name__] = error(lambda model=model: backward(model, 0))
    model = wrapped()
    said["again"] = error(lambda: DistributedDataParallel(model, comm.world()))
    said["inside"] = error(lambda: DistributedDataParallel(nn.Sequential(model, nn.Tanh()), comm.world()))
    said["second wrapper"] = error(lambda: DistributedDataParallel(model.module, comm.world()))
    said["deepcopy"], said["pickle"] = error(lambda: copy.deepcopy(model)), error(lambda: pickle.dumps(model))
    said["copy of the inside"] = error(lambda: DistributedDataParallel(copy.deepcopy(model.module), comm.world()))
    return said


def copies_of_the_inside(exact):
    """A copy of a module with BatchNorm, deep or pickled, is one that knows of no ranks: rank 0 alone trains it."""
    world = comm.world()
    model = wrapped(nn.BatchNorm(5, dtype=np.float64), exact=exact, micro_shards=world.size)
    backward(model, world.rank)
    results = []
    for twin in (copy.deepcopy(model.module), pickle.loads(pickle.dumps(model.module))):
        twin.zero_grad()
        if world.rank == 0:
            before = twin[2].running_mean.copy()
            backward(twin, 0)
            results.append(bool((twin[2].running_mean != before).all()) and twin[0].weight.grad is not None)
    model.zero_grad()
    backward(model, world.rank)
    return results, grads_of(model)


# ---------------------------------------------------------------- hooks

def hooks():
    """Gradients where hooks double one of them, registered in every possible place; and what a replacement says."""
    world, found = comm.world(), {}

    def double(tensor):
        tensor.grad = mt.tensor(2 * tensor.grad.numpy())
    for name in ("before wrapping", "after wrapping", "on the gradient"):
        inner = net()
        weight = inner[2].weight
        if name == "before wrapping":
            weight.register_post_accumulate_grad_hook(double)
        model = DistributedDataParallel(inner, world, bucket_cap_mb=1e-6)
        if name == "after wrapping":
            weight.register_post_accumulate_grad_hook(double)
        elif name == "on the gradient":
            weight.register_hook(lambda g: g * 2)
        for _ in range(2):
            model.zero_grad()
            backward(model, world.rank)
        found[name] = grads_of(model)
    inner = net()
    late = inner[0].weight      # whose gradient comes when the last layer's bucket has been posted
    late.register_post_accumulate_grad_hook(lambda t: double(inner[2].weight))
    model = DistributedDataParallel(inner, world, bucket_cap_mb=1e-6)
    found["of another"] = error(lambda: backward(model, world.rank))
    model = wrapped()
    found["create_graph"] = error(lambda: backward(model, world.rank, create_graph=True))
    return found


# ---------------------------------------------------------------- the usual

def the_usual():
    """{what was done: gradients of what must be right all the same}."""
    world, found = comm.world(), {}
    model = wrapped(bucket_cap_mb=1e-6)
    x, ct = data(world.rank)
    loss = (model(mt.tensor(x)) * ct).sum()
    loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    found["backward twice"] = grads_of(model)
    model.zero_grad()
    with mt.no_grad():
        model.train(False)(mt.tensor(data(7)[0]))
    model.train()
    backward(model, world.rank)
    found["evaluation between"] = grads_of(model)
    other = wrapped(bucket_cap_mb=1e-6)
    for m in (model, other):
        m.zero_grad()
    (x0, c0), (x1, c1) = data(world.rank), data(world.rank + 10)
    ((model(mt.tensor(x0)) * c0).sum() + (other(mt.tensor(x1)) * c1).sum()).backward()
    found["two models, one backward"], found["the other"] = grads_of(model), grads_of(other)
    return found


# ---------------------------------------------------------------- what must end the job

def one_rank_raises():
    """Rank 1's backward raises in its last layer; rank 0's must not take the sum for one of all ranks."""
    world = comm.world()
    model = wrapped(bucket_cap_mb=1e-6)
    for step in range(2):
        model.zero_grad()
        handle = model.module[0].bias.register_hook(_refuse) if world.rank == 1 and not step else None
        try:
            backward(model, world.rank)
        except ZeroDivisionError:
            handle.remove()


def _refuse(gradient):
    raise ZeroDivisionError("a hook that refuses")


def two_models_in_another_order():
    """Two buckets of one shape, which rank 1 posts the other way round."""
    models, x = [wrapped(), wrapped()], mt.tensor(data(0)[0])
    first, second = models if comm.world().rank == 0 else reversed(models)
    (first(x).sum() + second(x).sum()).backward()


# ---------------------------------------------------------------- parameters that nobody has used

class Two(nn.Module):
    """A layer that is always used, and one that may be; a frozen float16 table beside them."""

    def __init__(self):
        super().__init__()
        mt.manual_seed(5)
        self.always, self.maybe = (nn.Linear(4, 4, dtype=np.float64) for _ in range(2))
        self.last = nn.Linear(4, 3, dtype=np.float64)
        self.table = nn.Parameter(np.ones(3, np.float16))
        self.table.requires_grad_(False)

    def forward(self, x, both, raising=False):
        x = self.always(x)
        if raising:
            x.register_hook(lambda ct: 1 / 0)
        return self.last(self.maybe(x) if both else x)


def used_in_a_step_given_up(exact):
    """The names without a gradient after a step that uses only a part, behind one given up that used all, as unused
    ones too; and after a step of which the first of several passes alone uses all."""
    model = DistributedDataParallel(Two(), comm.world(), exact=exact, first_bucket_mb=1e-6, bucket_cap_mb=1e-6)
    x, ct = (mt.tensor(a) for a in data(0))

    def passes(*how):
        model.zero_grad()
        for _ in range(model.passes):
            (model(x, *how) * ct).sum().backward()
    passes(True)
    if exact:
        model.zero_grad()
        (model(x, True) * ct).sum().backward()
        model.forget_step()
    else:
        try:
            passes(True, True)
        except ZeroDivisionError:
            pass

    def without():
        return sorted(name for name, p in model.named_parameters() if p.grad is None)
    passes(False)
    found = without(), sorted(model.unused_parameters)
    model.zero_grad()
    for k in range(max(model.passes, 2)):
        with model.no_sync() if k == 0 and not exact else nullcontext():
            (model(x, k == 0) * ct).sum().backward()
    return *found, without()
