"""What the ranks do in the tests of buckets and of the check of the model."""

import hashlib
from contextlib import nullcontext
from functools import partial

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, ledger, nn, optim
from minitorch_dist.parallel import DistributedDataParallel, fully_shard
from minitorch_dist.parallel.tensor import tensor_parallel as tp


def digest(model):
    return hashlib.sha256(b"".join(p.numpy().tobytes() for _, p in sorted(model.named_parameters()))).hexdigest()


def grads_of(model):
    return {name: None if p.grad is None else p.grad.numpy().copy() for name, p in model.named_parameters()}


def values_of(model):
    return {name: p.numpy().copy() for name, p in model.named_parameters()}


# ---------------------------------------------------------------- parameters that take no part

class Heads(nn.Module):
    """A trunk and four heads, of which a rank uses one; the fourth is used by nobody."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(4, 3, bias=False, dtype=np.float64)
        for k in range(4):
            setattr(self, f"head{k}", nn.Linear(3, 2, bias=False, dtype=np.float64))

    def forward(self, x, k):
        return getattr(self, f"head{k}")(self.trunk(x))


def heads_input(rank):
    random = np.random.default_rng(rank)
    return random.standard_normal((5, 4)), random.standard_normal((5, 2))


def unused_parameters():
    """Rank r uses head r % 3: (initial values, gradients, unused names, values after AdamW), for each way to cut."""
    world = comm.world()
    results = []
    for options in ({"bucket_cap_mb": 1e-6}, {}, {"exact": True, "micro_shards": world.size}):
        mt.manual_seed(2)
        model = DistributedDataParallel(Heads(), world, **options)
        first = values_of(model)
        for _ in range(2):      # twice: what the first leaves behind must not disturb the second
            model.zero_grad()
            x, ct = heads_input(world.rank)
            (model(mt.tensor(x), world.rank % 3) * ct).sum().backward()
        grads, unused = grads_of(model), model.unused_parameters
        optim.AdamW(model.parameters(), weight_decay=0.5).step()
        results.append((first, grads, unused, values_of(model)))
    return results


# ---------------------------------------------------------------- the order of the first backward

class Backwards(nn.Module):
    """Its layers are used in the reverse order of their registration."""

    def __init__(self, widths, dtype=np.float64):
        super().__init__()
        pairs = list(zip(widths, widths[1:], strict=False))
        for i, (a, b) in reversed(list(enumerate(pairs))):
            setattr(self, f"layer{i}", nn.Linear(a, b, dtype=dtype))
        self.depth = len(pairs)

    def forward(self, x):
        for i in range(self.depth):
            x = getattr(self, f"layer{i}")(x).tanh()
        return x


def order_rebuilt(first="optimizer after"):
    """Three Adam steps; (bucket lists before and after the first, posts of the second, digests, values, what is said
    of a second backward upon the sums of the first)."""
    world = comm.world()
    mt.manual_seed(4)
    inner = Backwards([6, 5, 7, 3, 4])
    if first == "optimizer before":
        optimizer = optim.Adam(inner.parameters(), lr=0.01)
    for name, p in inner.named_parameters():    # before wrapping, so that it runs before the bucket is looked at
        p.register_post_accumulate_grad_hook(lambda t, name=name: ledger.event("gradient", name))
    model = DistributedDataParallel(inner, world, bucket_cap_mb=1e-6)
    if first == "optimizer after":
        optimizer = optim.Adam(model.parameters(), lr=0.01)
    names = {id(p): name for name, p in model.named_parameters()}

    def lists():
        return [[names[id(s.tensor)] for s in b.segments] for b in model.buckets]
    before, digests, events = lists(), [], []
    for step in range(3):
        x = np.random.default_rng([step, world.rank]).standard_normal((3, 6))
        optimizer.zero_grad()
        with ledger.record() as book:
            model(mt.tensor(x)).sum().backward()
        events.append(book.events)
        optimizer.step()
        digests.append(digest(model))
    again = DistributedDataParallel(Backwards([6, 5, 7, 3, 4]), world, bucket_cap_mb=1e-6)
    again(mt.tensor(x)).sum().backward()
    try:
        again(mt.tensor(x)).sum().backward()
    except RuntimeError as error:
        return before, lists(), events, digests, values_of(model), str(error)


# ---------------------------------------------------------------- is the model the same?

class Own(nn.Dropout):
    """No layer of the library's: its settings may be different on each rank."""


def different_models():
    """{what differs: the error}."""
    world = comm.world()
    odd = world.rank == world.size - 1

    def build(width=5, dtype=np.float32, extra=False, frozen=False, p=0.1, experts=2):
        net = nn.Sequential(nn.Linear(4, width, dtype=dtype), nn.ReLU(), nn.Linear(width, 3, dtype=dtype),
                            nn.Dropout(p), nn.MoE(3, 6, 4, k=experts))
        if extra:
            net.add_module("late", nn.Linear(3, 3))
        if frozen:
            net[0].weight.requires_grad_(False)
        return net
    said = {}
    for what, change, options in (("shape", {"width": 6}, {}), ("dtype", {"dtype": np.float64}, {}),
                                  ("more", {"extra": True}, {}), ("frozen", {"frozen": True}, {}),
                                  ("layer", {"p": 0.2}, {}), ("router", {"experts": 1}, {}),
                                  ("settings", {}, {"bucket_cap_mb": 3})):
        try:
            DistributedDataParallel(build(**(change if odd else {})), world, **(options if odd else {}))
            said[what] = "nothing"
        except ValueError as error:
            said[what] = str(error)
    block = nn.TransformerBlock(6, 2, dropout=0.2 if odd else 0.1)
    tp.parallelize_module(block, world.split(world.rank), tp.plan_of(block), sequence_parallel=True)
    try:
        DistributedDataParallel(block, world)
        said["layer in parts"] = "nothing"
    except ValueError as error:
        said["layer in parts"] = str(error)
    net = build()
    for layer in net.modules():     # notes of one's own
        layer.note, layer.seconds, layer.neighbours = f"of rank {world.rank}", 0.1 * world.rank, tuple(net)
    net.add_module("own", Own(0.1 * world.rank))
    DistributedDataParallel(net, world)
    return said


def frozen_parameters():
    """The first layer is frozen, and its values differ before wrapping: (values at first, gradients)."""
    world = comm.world()
    mt.manual_seed(world.rank)
    net = nn.Sequential(nn.Linear(4, 5, dtype=np.float64), nn.Linear(5, 3, dtype=np.float64))
    for p in net[0].parameters():
        p.requires_grad_(False)
    model = DistributedDataParallel(net, world)
    model(mt.tensor(np.full((2, 4), 1.0 + world.rank))).sum().backward()
    return values_of(model), grads_of(model)


class Tied(nn.Module):
    """One weight under two names: y = tanh(x W) Wᵀ."""

    def __init__(self):
        super().__init__()
        self.inward = nn.Linear(3, 4, bias=False, dtype=np.float64)
        self.outward = nn.Linear(4, 3, bias=False, dtype=np.float64)
        self.same = self.inward.weight      # a second name

    def forward(self, x):
        return (x @ self.same.T).tanh() @ self.inward.weight + self.outward.weight.sum() * 0.0


def shared_parameter():
    """(names of the bucketed parameters, value, gradient) of a weight that is used twice, after two backwards."""
    world = comm.world()
    mt.manual_seed(6)
    model = DistributedDataParallel(Tied(), world, bucket_cap_mb=1e-6)
    for _ in range(2):
        model.zero_grad()
        random = np.random.default_rng([5, world.rank])
        x, ct = random.standard_normal((5, 3)), random.standard_normal((5, 3))
        (model(mt.tensor(x)) * ct).sum().backward()
    weight = model.module.same
    return [model.names[id(s.tensor)] for b in model.buckets for s in b.segments], weight.numpy().copy(), \
        weight.grad.numpy().copy()


class Counting(nn.Module):
    """Its buffer counts the rows that it has seen, of this rank."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.register_buffer("rows", np.zeros(1))

    def forward(self, x):
        self.rows[...] += len(x)
        return self.linear(x)


def buffers():
    """The buffer after three forwards, the third in evaluation; with and without broadcast_buffers, inside of no_sync()
    and in exact mode."""
    world = comm.world()
    seen = []
    for settings in ({}, {"broadcast_buffers": False}, {}, {"exact": True}):
        model = DistributedDataParallel(Counting(), world, **settings)
        for k in range(3):
            model.train(k < 2)
            with model.no_sync() if len(seen) == 2 else nullcontext():
                model(mt.tensor(np.ones((1 + world.rank, 2), np.float32)))
        seen.append(float(model.module.rows[0]))
    return seen


class Assigning(Counting):
    """The same, but forward puts another array in the buffer's place."""

    def forward(self, x):
        self.rows = self.rows + len(x)
        return self.linear(x)


def assigned_buffer():
    """The buffer after two forwards."""
    world = comm.world()
    model = DistributedDataParallel(Assigning(), world)
    for _ in range(2):
        model(mt.tensor(np.ones((1 + world.rank, 2), np.float32)))
    return float(model.module.rows[0])


class Weighing(nn.Module):
    """Multiplies by a buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4, bias=False, dtype=np.float64)
        self.register_buffer("by", np.arange(1.0, 5))

    def forward(self, x):
        return self.linear(x) * self.by


def two_forwards_one_backward():
    """[(this rank's inputs, the gradient)] of each wrapper, of the sum of what two forwards give."""
    world, found = comm.world(), []
    xs = np.random.default_rng(world.rank).standard_normal((2, 5, 3))
    for wrap in (DistributedDataParallel, fully_shard):
        model = wrap(Weighing())
        (mt.sum(model(mt.tensor(xs[0]))) + mt.sum(model(mt.tensor(xs[1])))).backward()
        (p,) = model.parameters()
        found.append((xs, np.concatenate(world.all_gather_object(p.grad.numpy().reshape(-1)))[-12:]))
    return found


def odd_buffers():
    """[(values and strides of a transposed buffer, a frozen transposed parameter, a count that forward assigns)] of
    each wrapper, after two forwards of a model that is different on each rank."""
    world, found = comm.world(), []

    class Odd(Assigning):
        def forward(self, x):
            self.steps = self.steps + 1         # of NumPy a number
            return super().forward(x)
    for wrap in (DistributedDataParallel, partial(fully_shard, stage=1)):
        model = Odd()
        model.register_buffer("turned", (np.arange(12.0).reshape(3, 4) + world.rank).T)
        model.frozen = nn.Parameter((np.arange(6.0).reshape(3, 2) + world.rank).T, requires_grad=False)
        model.register_buffer("steps", np.array(world.rank))
        model = wrap(model, world)
        for _ in range(2):
            model(mt.tensor(np.ones((1, 2), np.float32)))
        turned = model.module.turned
        found.append((turned.tolist(), turned.strides, model.module.frozen.numpy().tolist(),
                      model.module.steps.tolist()))
    return found


# ---------------------------------------------------------------- freezing, and passes that raise

def heads_step(model, world):
    x, ct = heads_input(world.rank)
    (model(mt.tensor(x), world.rank % 3) * ct).sum().backward()


def frozen_and_thawed():
    """Two steps; then one with the trunk frozen, and two more: (values, gradients of the frozen step, last ones)."""
    world = comm.world()
    mt.manual_seed(2)
    model = DistributedDataParallel(Heads(), world, bucket_cap_mb=1e-6)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trunk, seen = model.module.trunk.weight, None
    for step in range(5):
        if step in (2, 3):
            trunk.requires_grad_(step == 3)
        optimizer.zero_grad()
        heads_step(model, world)
        optim.clip_grad_norm_(model.parameters(), 0.7)
        optimizer.step()
        if step == 2:
            seen = grads_of(model)
    return values_of(model), seen, grads_of(model)


def frozen_alone(n):
    """The same by one process."""
    mt.manual_seed(2)
    model = Heads()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        if step in (2, 3):
            model.trunk.weight.requires_grad_(step == 3)
        optimizer.zero_grad()
        for rank in range(n):
            x, ct = heads_input(rank)
            (model(mt.tensor(x), rank % 3) * ct).sum().backward()
        optim.clip_grad_norm_(model.parameters(), 0.7)
        optimizer.step()
    return values_of(model)


def thawed_too_late():
    """Frozen when wrapped, and wanted later; and what else is refused when a model is wrapped."""
    world = comm.world()
    said = {}

    def attempt(name, act):
        try:
            act()
            said[name] = "nothing"
        except (RuntimeError, ValueError) as error:
            said[name] = str(error)
    net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    net[0].weight.requires_grad_(False)
    model = DistributedDataParallel(net, world)
    net[0].weight.requires_grad_(True)
    attempt("thawed", lambda: model(mt.tensor(np.ones((2, 4), np.float32))))
    attempt("float16", lambda: DistributedDataParallel(nn.Linear(4, 5, dtype=np.float16), world))
    odd = Counting()
    odd.rows = np.broadcast_to(1.0, 3)
    attempt("read-only buffer", lambda: DistributedDataParallel(odd, world))
    return said


def after_a_pass_that_raised(exact):
    """Gradients of a good pass, after a first one that raised when its first bucket was posted, of one after another
    such pass, of another; the names of what its buckets hold."""
    world = comm.world()
    mt.manual_seed(2)
    model = DistributedDataParallel(Heads(), world, bucket_cap_mb=1e-6, exact=exact, micro_shards=2 * world.size)
    found = []
    for attempt in range(5):
        model.zero_grad()
        if attempt in (0, 2):
            handle = model.module.trunk.weight.register_hook(refuse)
        try:
            for _ in range(2 if exact else 1):
                heads_step(model, world)
            found.append(grads_of(model))
        except ZeroDivisionError:
            handle.remove()
    return [*found, held(model)]


def held(model):
    """The names of the parameters in the buckets, in order."""
    names = {id(p): name for name, p in model.named_parameters()}
    return sorted(names[id(s.tensor)] for b in model.buckets for s in b.segments)


def refuse(gradient):
    raise ZeroDivisionError("a hook that refuses")
