"""What the ranks do in the tests of comm/. Each function runs on every rank; what must hold is checked by the parent.

Data is keyed by (case, rank), so that the parent can work out what every rank held without asking it.
"""

import itertools
import os
import sys
import weakref

import numpy as np

from minitorch_dist import comm, ledger
from minitorch_dist.comm.state import state

SIZES = (1, 7, 4097, 100003)
DTYPES = ("f4", "f8", "i8")


def data_of(rank, size, dtype, salt=0):
    """What `rank` holds: random floats of widely different magnitudes, or integers."""
    random = np.random.default_rng([rank, size, salt])
    if np.dtype(dtype).kind == "i":
        return random.integers(-1000, 1000, size).astype(dtype)
    return (random.standard_normal(size) * 10.0 ** random.integers(-3, 4, size)).astype(dtype)


def placed(world, values, window):
    """The values in the shared window, or in plain memory."""
    x = world.empty(values.shape, values.dtype) if window else np.empty_like(values)
    x[...] = values
    assert world.in_window(x) == (window and world.size > 1)
    return x


def all_reduce_everything():
    """{(size, dtype, op, in the window): the result}, on every rank."""
    world = comm.world()
    results = {}
    for size in SIZES:
        for dtype in DTYPES:
            for op in ("sum", "max", "min") + (("mean",) if dtype != "i8" else ()):
                for window in (True, False):
                    x = placed(world, data_of(world.rank, size, dtype), window)
                    assert world.all_reduce(x, op) is None
                    results[size, dtype, op, window] = x.copy()
    return results


def narrow_sums():
    """{(dtype, what, in the window, posted): the sum}, of integers whose sum is beyond their dtype."""
    world = comm.world()
    results, size = {}, 96 * world.size + world.size     # some of it in whole vectors of the processor, some not
    for dtype in ("i1", "u1", "i2", "u2"):
        for window in (True, False):
            for posted in (True, False):
                for what in ("all_reduce", "reduce", "reduce_scatter"):
                    x = placed(world, narrow(world.rank, size, dtype), window)
                    out = np.empty(size // world.size, dtype)
                    arguments = {"all_reduce": (x,), "reduce": (x, 0), "reduce_scatter": (out, x)}[what]
                    work = getattr(world, what)(*arguments, async_op=posted)
                    if posted:
                        work.wait()
                    results[dtype, what, window, posted] = out if what == "reduce_scatter" else x.copy()
    return results


def narrow(rank, size, dtype):
    """Integers from the dtype's whole range."""
    info = np.iinfo(dtype)
    return np.random.default_rng([rank, size]).integers(info.min, info.max, size, dtype, endpoint=True)


def exact_bits():
    """{(size, dtype, in the window): the exact sum}."""
    world = comm.world()
    results = {}
    for size in SIZES:
        for dtype in ("f4", "f8"):
            for window in (True, False):
                x = placed(world, data_of(world.rank, size, dtype), window)
                work = world.all_reduce(x, exact=True, async_op=dtype == "f8")
                if work is not None:
                    work.wait()
                results[size, dtype, window] = x.copy()
    return results


def exact_in_order(order):
    """On the ranks of the world in that order: (they themselves, the exact sum, the usual one)."""
    world = comm.world()
    c = world.split(0, key=order.index(world.rank))
    exact, usual = (placed(c, data_of(world.rank, 4097, "f4"), window=True) for _ in range(2))
    c.all_reduce(exact, exact=True)
    c.all_reduce(usual)
    return c.world_ranks, exact.copy(), usual.copy()


def views():
    """A reduction of one row of a window array: (whole array after it, was the view in the window?)."""
    world = comm.world()
    whole = world.empty((3, 1000), "f4")
    whole[...] = data_of(world.rank, 3000, "f4").reshape(3, 1000)
    row = whole[1]
    in_window = world.in_window(row)
    world.all_reduce(row)
    turned = world.empty(100, "f4")
    for x, sent in ((turned, 1), (turned.view("i4"), -1)):      # the same place: -1 is NaN as a float
        x[:] = sent
        world.all_reduce(x)
        assert (x == sent * world.size).all()
    world.all_reduce(whole[2, :0] if world.rank == 0 else np.zeros(0, "f4"))     # what is empty lies nowhere
    return whole.copy(), in_window


def outstanding():
    """Five works posted, two of them outside the window, waited for in an order that isn't theirs; the results."""
    world = comm.world()
    arrays = [placed(world, data_of(world.rank, 5000 + i, "f8"), window=i % 2 == 0) for i in range(5)]
    works = [world.all_reduce(x, async_op=True) for x in arrays]
    posted = [x.copy() for x in arrays if world.in_window(x)]
    untouched = all((x == data_of(world.rank, x.size, "f8")).all() for x in posted) if world.rank == 0 else None
    world.barrier()
    for i in (4, 0, 3, 1, 2):
        works[i].wait()
        assert works[i].is_completed()
    return [x.copy() for x in arrays], untouched


def polling():
    """Works that nobody waits for, only asks: both engines must come to an end."""
    world = comm.world()
    arrays = [placed(world, data_of(world.rank, 3000, "f8"), window) for window in (True, False)]
    works = [world.all_reduce(x, async_op=True) for x in arrays]
    while not all(work.is_completed() for work in works):
        pass
    world.barrier()
    return [x.copy() for x in arrays]


def asked_alone():
    """An exact reduce_scatter that rank 0 asks about until it has completed, while the others, who have posted it,
    wait for a message: (this rank's part of the sum, the same of an exact all_reduce)."""
    world = comm.world()
    x, out = data_of(world.rank, 50 * world.size, "f4"), np.full(50, np.nan, "f4")
    work = world.reduce_scatter(out, x, exact=True, async_op=True)
    if world.rank == 0:
        while not work.is_completed():
            pass
        for other in range(1, world.size):
            world.send(np.zeros(1), other)
    else:
        world.recv(np.zeros(1), 0)
        work.wait()
    world.all_reduce(x, exact=True)
    return out, x.reshape(world.size, -1)[world.rank].copy()


def interrupted():
    """Rank 0's wait for the others is broken off, of a reduction that is new and of one that is remembered, and it goes
    on to the next one: the values of both."""
    world, found = comm.world(), []
    x, y = world.empty(1000, "f8"), world.empty(1000, "f8")
    for _ in range(2):
        x[:], y[:] = world.rank + 1, 10 * (world.rank + 1)
        if world.rank == 0:
            world._window.pause = interrupt
            try:
                world.all_reduce(x)
            except KeyboardInterrupt:
                found.append("broken off")
            del world._window.pause
            for other in range(1, world.size):
                world.send(np.zeros(1), other)
        else:
            world.recv(np.zeros(1), 0)      # before it, rank 0 has nothing to do but to wait
            world.all_reduce(x)
        world.all_reduce(y)
        found += set(x.tolist()), set(y.tolist())
    return found


def interrupt(spins):
    raise KeyboardInterrupt


def data_movers():
    """One call of each of the others, in and out of the window where that matters; {name: result}."""
    world = comm.world()
    rank, size = world.rank, world.size
    results = {}
    for window in (True, False):
        x = placed(world, data_of(rank, 100 * size, "f4"), window)
        out = np.full(100, np.nan, "f4")
        world.reduce_scatter(out, x)
        results["reduce_scatter", window] = out
        assert (x == data_of(rank, 100 * size, "f4")).all()
        world.reduce_scatter(x.reshape(size, -1)[rank], x, "mean")   # into its own place
        results["reduce_scatter into itself", window] = x.reshape(size, -1)[rank].copy()

        out = placed(world, np.full((size, 100), np.nan, "f4"), window)
        world.all_gather(out, data_of(rank, 100, "f4"))
        results["all_gather", window] = out.copy()
        out = placed(world, np.full((size, 100), np.nan, "f4"), window)
        out[rank] = data_of(rank, 100, "f4")
        world.all_gather(out, out[rank], async_op=True).wait()       # from its own place
        results["all_gather from itself", window] = out.copy()

    x, out = data_of(rank, 6 * size, "f8").reshape(2 * size, 3), np.full((2 * size, 3), np.nan)
    world.all_to_all(out, x)
    results["all_to_all"] = out
    # rank i sends i+j rows to rank j
    x = data_of(rank, 3 * sum(rank + j for j in range(size)), "f8").reshape(-1, 3)
    out = np.full((sum(i + rank for i in range(size)), 3), np.nan)
    counts = [rank + j for j in range(size)]
    world.all_to_all(out, x, counts, counts, async_op=True).wait()
    results["all_to_all with counts"] = out
    out = np.full_like(out, np.nan)
    work = world.all_to_all(out, x, counts, counts, async_op=True)
    while not work.is_completed():
        pass
    results["all_to_all with counts, asked about"] = out
    for src in range(size):
        x = data_of(rank, 9, "f2")   # a dtype that MPI has no name for
        world.broadcast(x, src)
        results["broadcast", src] = x
    return results


def messages():
    """Round the ring twice: blocking, then posted with the tags crossed. What arrived."""
    world = comm.world()
    rank, after, before = world.rank, (world.rank + 1) % world.size, (world.rank - 1) % world.size
    first, second, third = np.empty(50), np.empty(60), np.empty(70)
    if rank == 0:
        world.send(data_of(rank, 50, "f8"), after)
        world.recv(first, before)
    else:
        world.recv(first, before)
        world.send(data_of(rank, 50, "f8"), after)
    receives = [world.irecv(third, before, tag=3), world.irecv(second, before, tag=2)]
    sends = [world.isend(data_of(rank, 60, "f8"), after, tag=2), world.isend(data_of(rank, 70, "f8"), after, tag=3)]
    for work in receives + sends:
        work.wait(timeout=20)
    return first, second, third


def objects():
    world = comm.world()
    mine = {"rank": world.rank, "text": "ü" * 1000 * world.rank}
    last = world.size - 1
    return (world.broadcast_object(mine, last), world.gather_object(mine, last), world.all_gather_object(mine),
            world.all_gather_object(None))


def groups():
    """Two groups by parity with their order reversed, and a third that leaves rank 0 out."""
    world = comm.world()
    half = world.split(world.rank % 2, key=-world.rank, name="half")
    x = half.empty(1000, "f8")
    x[:] = 10.0 ** world.rank
    half.all_reduce(x)
    rest = world.split(None if world.rank == 0 else 7)
    return (half.rank, half.size, half.name, half.world_ranks, half.all_gather_object(world.rank), x[0],
            None if rest is None else (rest.name, rest.world_ranks))


def counted():
    """{call: (calls, bytes, those between nodes, keys)} in the ledger of this rank."""
    world = comm.world()
    size, rank = world.size, world.rank
    n = 16 * size * 100
    in_window, plain, part = world.empty(n, "f4"), np.zeros(n, "f4"), np.zeros(n // size, "f4")
    odd_window, odd_plain = world.empty(100003, "f4"), np.zeros(100003, "f4")
    calls = {
        "all_reduce window": lambda: world.all_reduce(in_window),
        "all_reduce plain": lambda: world.all_reduce(plain),
        "all_reduce odd window": lambda: world.all_reduce(odd_window),
        "all_reduce odd plain": lambda: world.all_reduce(odd_plain),
        "all_reduce posted": lambda: world.all_reduce(plain, async_op=True).wait(),
        "reduce_scatter": lambda: world.reduce_scatter(part, plain),
        "reduce_scatter window": lambda: world.reduce_scatter(part, in_window),
        "all_gather": lambda: world.all_gather(in_window, part),
        "all_to_all": lambda: world.all_to_all(odd_plain[:n], plain),
        "broadcast": lambda: world.broadcast(plain, 1),
        "reduce": lambda: world.reduce(plain, 1),
        "gather": lambda: world.gather(plain if rank == 1 else None, part, 1),
        "scatter": lambda: world.scatter(part, plain if rank == 1 else None, 1),
        "send": lambda: world.send(plain, 1) if rank == 0 else world.recv(plain, 0) if rank == 1 else None,
        "send across": lambda: world.send(plain, size - 1) if rank == 0 else
            world.recv(plain, 0) if rank == size - 1 else None,
        "barrier": world.barrier,
    }
    if size in (2, 4):
        calls["all_reduce exact plain"] = lambda: world.all_reduce(plain, exact=True)
    counts = {}
    for name, run in calls.items():
        with ledger.record() as book:
            run()
        counts[name] = (sum(book.calls.values()), book.total_bytes_sent(), sum(book.bytes_between_nodes.values()),
                        sorted(book.calls))
    return counts


class Recorder:
    """A hook that writes down what it sees."""

    def __init__(self):
        self.seen = []

    def before(self, op, x, peer):
        self.seen.append(("before", op, None if x is None else x.size, peer))

    def after(self, op, x, peer):
        self.seen.append(("after", op, None if x is None else x.size, peer))


def hooked():
    world = comm.world()
    recorder = Recorder()
    world.hooks.append(recorder)
    x = world.empty(10, "f4")
    world.all_reduce(x)
    work = world.all_reduce(np.zeros(11), async_op=True)
    world.broadcast(np.zeros(12), 1)
    work.wait()
    world.barrier()
    child = world.split(0)
    world.hooks.remove(recorder)
    child.barrier()   # a copy of the hooks
    return recorder.seen


def memory():
    """Alignment, order, zeros, and that a window array's memory goes with its last view: a list of facts."""
    world = comm.world()
    arrays = [world.empty(shape, dtype) for shape, dtype in (((3, 5), "f4"), (7, "f8"), ((), "i8"), ((0, 4), "f4"))]
    facts = [(x.shape, x.dtype.str, x.ctypes.data % 64 if x.size else 0, x.flags.c_contiguous, not x.any())
             for x in arrays]
    files = len(os.listdir("/proc/self/fd"))
    many = [world.empty(10, "f4") for _ in range(300)]
    kept = len(os.listdir("/proc/self/fd")) - files
    assert kept == (0 if sys.version_info >= (3, 13) else 300)      # before, Python keeps one for each mapping
    whole = arrays[0].reshape(-1).view("u1")
    for first, last in itertools.combinations(range(whole.size + 1), 2):     # 1,830 pieces: no end of what is kept
        world.all_reduce(whole[first:last])
    assert len(world._window.find(whole)[0]._views) <= 1001
    view = many[7][2:5]
    segments = len(world._window._segments)
    del many
    assert len(os.listdir("/proc/self/fd")) <= files + 1
    alive = len(world._window._segments)
    assert all(world.in_window(x) for x in (view, *arrays) if x.size)       # those that live are those that are left
    view[:] = world.rank
    world.all_reduce(view)
    del view
    mapped = sum("/memfd:minitorch" in line for line in open("/proc/self/maps"))
    return facts, segments, alive, len(world._window._segments), mapped, arrays[0].any()


def without_memory():
    """The window's memory can't be had: there is none for rank 1. Plain memory takes its place, on all ranks."""
    world = comm.world()

    def full(file, offset, length):
        assert offset == length > 0     # the second rank's part
        raise OSError(28, "No space left on device")
    before = os.posix_fallocate
    if world.rank == 1:
        os.posix_fallocate = full
    try:
        x = world.empty(1000, "f4")
    finally:
        os.posix_fallocate = before
    x[:] = world.rank + 1
    world.all_reduce(x)
    return world.in_window(x), x[0]


def memory_with_a_name(why):
    """Memory without a name can't be had; where it can't, a file of /dev/shm takes its place: (in the window, the sum,
    the files of /dev/shm that this rank has mapped)."""
    world = comm.world()
    if why == "not on this system" and world.rank == 0:
        del os.memfd_create
    elif why == "processes aren't seen" and world.rank == 1:
        original = os.open
        os.open = lambda path, *how: original(path.replace("/proc/", "/no/such/place/"), *how)
    elif why == "another process has the number" and world.rank == 1:
        original = os.open
        os.open = lambda path, *how: os.memfd_create("other") if path.startswith("/proc/") else original(path, *how)
    x = world.empty(1000, "f4")
    x[:] = world.rank + 1
    world.all_reduce(x)
    with open("/proc/self/maps") as maps:
        return world.in_window(x), x[0], sorted({line.split()[5] for line in maps if "/minitorch_" in line and
                                                 "(deleted)" in line})


def looked_at():
    """The operations whose calls a look at where the rank is has seen, and those whose arrays it has kept alive."""
    world, seen, alive = comm.world(), [], []
    state.enter = lambda call: (seen.append(call), type(state).enter(state, call))
    try:
        for window in (True, False):
            for op in ("all_reduce", "broadcast", "reduce_scatter", "all_gather"):
                for posted in (False, True):
                    x, out = placed(world, np.ones(3 * world.size), window), None
                    x = x.view()        # the window itself stays
                    if op in ("all_reduce", "broadcast"):
                        work = getattr(world, op)(x, async_op=posted)
                    else:
                        out, whole = (np.zeros(3), x) if op == "reduce_scatter" else (x, np.ones(3))
                        work = getattr(world, op)(out, whole, async_op=posted)
                        del whole
                    if work is not None:
                        work.wait()
                    held = weakref.ref(x)
                    del x, out, work
                    if held() is not None:
                        alive.append((op, window, posted))
    finally:
        del state.enter
    return {call.op for call in seen}, alive


def mesh():
    """(coords, {axis: sum of world ranks along it}, {axis: rank in it}, axes that the ledger names, as text)."""
    grid = comm.DeviceMesh(dp=2, pp=1, tp=-1)
    sums, places = {}, {}
    with ledger.record() as book:
        for names in ("dp", "pp", "tp", ("dp", "pp", "tp")):
            communicator = grid[names]
            x = np.array([float(grid.world.rank)])
            communicator.all_reduce(x)
            sums[communicator.name], places[communicator.name] = int(x[0]), communicator.rank
            assert grid[names] is communicator
    return grid.coords, sums, places, [axis for axis, op in book.calls if op == "all_reduce"], str(grid)
