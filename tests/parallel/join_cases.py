"""What the ranks do in the tests of join."""

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, ledger, nn, optim
from minitorch_dist.parallel import DistributedDataParallel
from minitorch_dist.parallel.comm_hooks import fp16_compress

from .ddp_cases import Counting, values_of

JOIN_BATCHES = ((5, 2, 3, 4), (1, 6), (3, 3, 2, 2, 2), ())     # rank -> rows of each of its batches


def join_rows(rank, step):
    random = np.random.default_rng([7, rank, step])
    rows = JOIN_BATCHES[rank][step]
    return random.standard_normal((rows, 4)), random.integers(0, 3, rows)


def join_model():
    mt.manual_seed(11)
    return nn.Sequential(nn.Linear(4, 6, dtype=np.float64), nn.Tanh(), nn.Linear(6, 3, dtype=np.float64))


def join_alone(ranks):
    """The same by one process: each step's batch is what the ranks have."""
    model = join_model()
    optimizer = optim.Adam(model.parameters(), lr=0.05)
    for step in range(max(len(b) for b in JOIN_BATCHES[:ranks])):
        parts = [join_rows(rank, step) for rank in range(ranks) if step < len(JOIN_BATCHES[rank])]
        x, labels = (np.concatenate(p) for p in zip(*parts, strict=True))
        optimizer.zero_grad()
        (nn.cross_entropy(model(x), labels, reduction="sum") / len(x)).backward()
        optim.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
    return values_of(model)


def join_uneven():
    """(values, all-reduces, what misuse says)."""
    world = comm.world()
    model = DistributedDataParallel(join_model(), world, bucket_cap_mb=1e-6)
    optimizer = optim.Adam(model.parameters(), lr=0.05)
    steps = 0

    def update():
        nonlocal steps
        steps += 1
        optim.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
    with ledger.record() as book, model.join(update) as count:
        for step in range(len(JOIN_BATCHES[world.rank])):
            x, labels = join_rows(world.rank, step)
            optimizer.zero_grad()
            (nn.cross_entropy(model(x), labels, reduction="sum") / count(len(x))).backward()
            update()
    return values_of(model), book.calls[world.name, "all_reduce"], steps


def join_misuse():
    world = comm.world()
    said = {}

    def attempt(name, act):
        try:
            act()
            said[name] = "nothing"
        except (RuntimeError, ValueError) as error:
            said[name] = str(error)
    attempt("exact", lambda: DistributedDataParallel(join_model(), world, exact=True).join(None))
    attempt("buffers", lambda: DistributedDataParallel(Counting(), world).join(None))
    norm = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm(3))
    attempt("batch norm", lambda: DistributedDataParallel(norm, world).join(None))
    attempt("no rows", lambda: DistributedDataParallel(join_model(), world).join(None)(0))
    attempt("half a row", lambda: DistributedDataParallel(join_model(), world).join(None)(2.5))
    attempt("hook in exact mode",
            lambda: DistributedDataParallel(join_model(), world, exact=True).register_comm_hook(fp16_compress))
    return said
