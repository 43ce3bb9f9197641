"""What the ranks do in the tests of parallel/. What must hold is checked by the parent process."""

import hashlib

import numpy as np

import minitorch_dist as mt
from minitorch_dist import backend, comm, data, ledger, nn, optim
from minitorch_dist.parallel import BinaryCounter, DistributedDataParallel

from . import plain

BATCH, STEPS = 12, 100
OPTIMIZERS = {
    "sgd": lambda params: optim.SGD(params, lr=0.1),
    "momentum": lambda params: optim.SGD(params, lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda params: optim.Adam(params, lr=0.01),
    "adamw": lambda params: optim.AdamW(params, lr=0.01),
}


class PlainMemory:
    """A communicator whose arrays live outside of the node's window, as they do where ranks sit on several nodes."""

    def __init__(self, communicator):
        self.communicator = communicator

    def __getattr__(self, name):
        return getattr(self.communicator, name)

    def empty(self, shape, dtype, device="cpu"):
        return np.zeros(shape, dtype)


def small_model(dtype=np.float64):
    """plain.py's model, with plain.py's initial values."""
    model = nn.Sequential(nn.Linear(plain.FEATURES, plain.HIDDEN, dtype=dtype), nn.Tanh(),
                          nn.Linear(plain.HIDDEN, plain.CLASSES, dtype=dtype))
    names = ["0.weight", "0.bias", "2.weight", "2.bias"]
    model.load_state_dict({name: p.astype(dtype) for name, p in zip(names, plain.initial(), strict=True)})
    return model


def model_with_dropout(dtype):
    mt.manual_seed(5)
    return nn.Sequential(nn.Linear(plain.FEATURES, 19, dtype=dtype), nn.ReLU(), nn.Dropout(0.3),
                         nn.Linear(19, plain.HIDDEN, dtype=dtype), nn.Tanh(), nn.Dropout(0.2),
                         nn.Linear(plain.HIDDEN, plain.CLASSES, dtype=dtype))


def digest(model):
    return hashlib.sha256(b"".join(p.numpy().tobytes() for _, p in sorted(model.named_parameters()))).hexdigest()


def parameters(model):
    return {name: p.numpy().copy() for name, p in model.named_parameters()}


def train(model, optimizer, loader, steps, world=None, clip=None, seed=3, micro_shards=8):
    """(the global loss of every step, the digest of all parameters after every step)."""
    losses, digests = [], []
    step = 0
    while step < steps:
        for batch in loader.epoch(step // len(loader), start=step % len(loader)):
            if step == steps:
                break
            optimizer.zero_grad()
            total = np.zeros(1)
            for shard in batch.shards:
                with backend.random_scope(seed, step, batch.count, shard.rows, micro_shards):
                    loss = nn.cross_entropy(model(shard.inputs), shard.labels, reduction="sum") / batch.count
                    loss.backward()
                total += loss.item()
            if world is not None:
                world.all_reduce(total)
            if clip is not None:
                optim.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            losses.append(float(total[0]))
            digests.append(digest(model))
            step += 1
    return losses, digests


def loader_for(dtype, rank=0, size=1, micro_shards=1, batch=BATCH, seed=3):
    x, labels = plain.dataset()
    return data.Loader(x.astype(dtype), labels, batch, seed=seed, rank=rank, size=size, micro_shards=micro_shards)


# ---------------------------------------------------------------- one curve

CURVES = {      # name -> (dtype, optimizer, clip, dropout)
    "sgd": ("f8", "sgd", None, False),
    "momentum, clipped": ("f8", "momentum", 0.3, False),
    "momentum, dropout": ("f8", "momentum", None, True),
    "adam, clipped, dropout": ("f8", "adam", 0.3, True),
    "adamw, dropout": ("f8", "adamw", None, True),
    "float32 sgd": ("f4", "sgd", None, False),
    "float32 sgd, clipped, dropout": ("f4", "sgd", 0.3, True),
}


def curve(name, world=None, **options):
    """Train one of CURVES; without a world as one process that knows nothing of ranks."""
    dtype, optimizer, clip, dropout = CURVES[name]
    dtype = np.dtype(dtype).type
    model = (model_with_dropout if dropout else small_model)(dtype)
    rank, size = 0, 1
    if world is not None:
        model = DistributedDataParallel(model, world, **options)
        rank, size = world.rank, world.size
    losses, digests = train(model, OPTIMIZERS[optimizer](model.parameters()), loader_for(dtype, rank, size), STEPS,
                            world, clip)
    return losses, digests, parameters(model)


def curves():
    """{name: (losses, digests, parameters)} of all CURVES; every other one with a bucket for each parameter."""
    return {name: curve(name, comm.world(), **({"bucket_cap_mb": 1e-6} if k % 2 else {}))
            for k, name in enumerate(CURVES)}


def against_independent(name, steps, clip, seed):
    """The parameters after some steps of model_with_dropout, for test_independent.py."""
    world, dtype = comm.world(), np.float32 if name == "float32" else np.float64
    exact = name == "exact"
    model = DistributedDataParallel(model_with_dropout(dtype), world, exact=exact, bucket_cap_mb=1e-6)
    loader = loader_for(dtype, world.rank, world.size, 8 if exact else 1)
    train(model, OPTIMIZERS["momentum"](model.parameters()), loader, steps, None, clip, seed)
    return parameters(model)


def plain_sgd():
    """plain.train's training by the library: (losses, parameters)."""
    world = comm.world()
    model = DistributedDataParallel(small_model(), world)
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses, _ = train(model, optimizer, loader_for(np.float64, world.rank, world.size), STEPS, world, clip=0.5)
    return losses, parameters(model)


# ---------------------------------------------------------------- gradients

def share(world, rows):
    """This rank's part of some rows, as slices of the data set."""
    lo, hi = (len(rows) * r // world.size for r in (world.rank, world.rank + 1))
    x, labels = plain.dataset()
    return x[rows[lo:hi]], labels[rows[lo:hi]]


def add_gradient(model, rows, count, world):
    x, labels = share(world, np.asarray(rows))
    (nn.cross_entropy(model(x), labels, reduction="sum") / count).backward()


def gradients(model):
    return [p.grad.numpy().copy() for p in model.parameters()]


def calls(book, world):
    return book.calls[world.name, "all_reduce"]


def gradient_cases():
    """{case: whatever the parent wants to see}; all in one launch."""
    world = comm.world()
    seen = {}
    bucketed = {"bucket_cap_mb": 1e-6}

    for name, options in {"one bucket": {}, "a bucket each": bucketed, "outside the window": bucketed}.items():
        on = PlainMemory(world) if name == "outside the window" else world
        model = DistributedDataParallel(small_model(), on, **options)
        with ledger.record() as book:
            add_gradient(model, range(13), 13, world)
        seen["summed", name] = gradients(model)
        seen["traffic", name] = (len(model.buckets), calls(book, world), book.bytes_sent[world.name, "all_reduce"],
                                 sum(b.flat.grads.nbytes for b in model.buckets), dict(book.calls))

    # Accumulation: three backwards keep quiet, the fourth sums.
    model = DistributedDataParallel(small_model(), world, **bucketed)
    with ledger.record() as book:
        with model.no_sync():
            for first in (0, 13, 26):
                add_gradient(model, range(first, first + 13), 53, world)
            seen["calls inside no_sync"] = len(book.calls)
        add_gradient(model, range(39, 53), 53, world)
    seen["calls after no_sync"] = calls(book, world)
    seen["accumulated"] = gradients(model)

    # The switch goes back, nested and with an exception.
    model.zero_grad()
    with model.no_sync():
        try:
            with model.no_sync():
                raise KeyError("inside")
        except KeyError:
            seen["still off"] = not model.sync
    seen["on again"] = model.sync
    add_gradient(model, range(13), 13, world)
    seen["after an exception"] = gradients(model)

    # A backward that breaks off half-way, after some buckets were posted; then one that doesn't.
    model = DistributedDataParallel(small_model(), world, **bucketed)
    first = model.module[0]
    handle = first.weight.register_post_accumulate_grad_hook(_refuse)
    for quiet in (False, True):
        model.zero_grad()
        try:
            if quiet:
                with model.no_sync():
                    add_gradient(model, range(7), 7, world)
            else:
                add_gradient(model, range(7), 7, world)
        except ZeroDivisionError:
            seen["broken off", quiet] = [p.grad is not None for p in model.parameters()]
    handle.remove()
    model.zero_grad()
    with ledger.record() as book:
        add_gradient(model, range(13), 13, world)
    seen["after breaking off"] = gradients(model), calls(book, world)

    # Forgotten zero_grad: the sum would be summed again.
    for name, options in {"one bucket": {}, "a bucket each": bucketed}.items():
        model = DistributedDataParallel(small_model(), world, **options)
        add_gradient(model, range(13), 13, world)
        try:
            add_gradient(model, range(13), 13, world)
            seen["summed twice", name] = "nothing"
        except RuntimeError as error:
            seen["summed twice", name] = str(error)
        model.zero_grad()
        add_gradient(model, range(13), 13, world)
        seen["and then", name] = gradients(model)

    # What was computed from a gradient before it was summed can't be differentiated any more.
    net, kept = small_model(), []
    net[0].weight.register_post_accumulate_grad_hook(lambda t: kept.append((t.grad * t).sum()))
    add_gradient(DistributedDataParallel(net, world), range(13), 13, world)
    try:
        kept[0].backward()
        seen["stale"] = "nothing"
    except RuntimeError as error:
        seen["stale"] = str(error)
    return seen


def _refuse(tensor):
    raise ZeroDivisionError("a hook that refuses")


def bucket_order():
    """The program order of one backward: which gradients were complete when which bucket was posted."""
    world = comm.world()
    mt.manual_seed(world.rank)
    widths = [7, 9, 8, 6, 5]
    net = nn.Sequential(*[nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False)])
    for name, p in net.named_parameters():      # before wrapping, so that it runs before the bucket is looked at
        p.register_post_accumulate_grad_hook(lambda t, name=name: ledger.event("gradient", name))
    before = digest(net)
    names = {id(p): name for name, p in net.named_parameters()}
    model = DistributedDataParallel(net, world, bucket_cap_mb=1e-6)
    lists = [[names[id(s.tensor)] for s in b.flat.segments] for b in model.buckets]
    with ledger.record() as book:
        model(mt.tensor(np.ones((3, 7), np.float32))).sum().backward()
    return book.events, lists, before, digest(model), [name for name, _ in model.named_parameters()]


# ---------------------------------------------------------------- exact mode

SIGNS = {"lion": lambda params: optim.Lion(params, lr=1e-3)}       # which a rounding turns around
EXACT = {   # name -> (dtype, optimizer, clip, micro-shards, options)
    "momentum": ("f4", "momentum", None, 8, {}),
    "adam, clipped, a bucket each": ("f4", "adam", 0.3, 8, {"bucket_cap_mb": 1e-6}),
    "16 micro-shards": ("f4", "momentum", None, 16, {}),
    "float64": ("f8", "momentum", 0.3, 8, {}),
    "signs": ("f4", "lion", None, 8, {}),
}
EXACT_STEPS, EXACT_BATCH = 12, 15       # an epoch: 15, 15, 15 and the last one of 8 rows; see small_batches for fewer


def exact_curve(dtype, optimizer, clip, micro_shards, options, seed=3, batch=EXACT_BATCH, place=lambda world: world):
    world = comm.world()
    dtype = np.dtype(dtype).type
    model = DistributedDataParallel(model_with_dropout(dtype), place(world), exact=True, micro_shards=micro_shards,
                                    **options)
    loader = loader_for(dtype, world.rank, world.size, micro_shards, batch, seed)
    make = (OPTIMIZERS | SIGNS)[optimizer]
    _, digests = train(model, make(model.parameters()), loader, EXACT_STEPS, None, clip, seed, micro_shards)
    return digests


def exact_curves():
    """{name: the digest after every step}, and what the closed form must give."""
    from threadpoolctl import threadpool_limits
    world = comm.world()
    threadpool_limits(1)
    seen = {name: exact_curve(*settings) for name, settings in EXACT.items()}
    seen["outside the window"] = exact_curve(*EXACT["momentum"], place=PlainMemory)
    seen["another seed"] = exact_curve(*EXACT["momentum"], seed=4)
    seen["last batch of 3 rows"] = exact_curve(*EXACT["momentum"], batch=10)     # 53 = 5 · 10 + 3, fewer than 8

    model = DistributedDataParallel(small_model(), world, exact=True)
    x, labels = plain.dataset()
    shards = 8 // world.size
    for repeat in range(2):     # the second step starts from nothing
        model.zero_grad()
        for v in range(world.rank * shards, (world.rank + 1) * shards):
            rows = slice(13 * v // 8, 13 * (v + 1) // 8)
            with ledger.record() as book:
                (nn.cross_entropy(model(x[rows]), labels[rows], reduction="sum") / 13).backward()
            seen["calls", repeat, v % shards] = book.calls[world.name, "all_reduce"]
        seen["gradient", repeat] = gradients(model)
    return seen


def exact_misuse():
    """What raises, as text."""
    world = comm.world()
    said = {}

    def attempt(name, act):
        try:
            act()
            said[name] = ""
        except (ValueError, RuntimeError) as error:
            said[name] = str(error)
    attempt("8 micro-shards", lambda: DistributedDataParallel(small_model(), world, exact=True))
    attempt("6 micro-shards", lambda: DistributedDataParallel(small_model(), world, exact=True, micro_shards=6))
    if world.size == 2:
        attempt("1 micro-shard", lambda: DistributedDataParallel(small_model(), world, exact=True, micro_shards=1))
        model = DistributedDataParallel(small_model(), world, exact=True, micro_shards=2)
        attempt("no_sync", lambda: model.no_sync().__enter__())
        add_gradient(model, range(13), 13, world)
        attempt("summed twice", lambda: add_gradient(model, range(13), 13, world))
    return said


def counter_sum(arrays):
    """BinaryCounter's sum of some arrays, which it may overwrite."""
    counter = BinaryCounter()
    for a in arrays:
        counter.add(a.copy())
    return counter.total().copy(), len(counter.free)
