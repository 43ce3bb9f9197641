"""What the ranks do in the tests of the collectives for reading, of the rooted ones, and of the mismatch check."""

import warnings

import numpy as np

from minitorch_dist import comm, ledger
from minitorch_dist.comm.algorithms import ALGORITHMS
from minitorch_dist.comm.reduction import OPS

from .cases import data_of, placed

LENGTHS = (1, 5, 16, 1003)


class Log:
    """A hook that writes down the messages: [(who does what, with whom)]."""

    def __init__(self):
        self.seen = []

    def before(self, op, x, peer):
        if op in ("send", "isend"):
            self.seen.append((op, peer))

    def after(self, op, x, peer):
        if op == "recv":
            self.seen.append((op, peer))


def every_algorithm():
    """{(algorithm, length, op, dtype): (result, bytes that this rank sent, its messages)}."""
    world = comm.world()
    results = {}
    for name in ALGORITHMS:
        for length in LENGTHS:
            for op, dtype in (("sum", "f4"), ("mean", "f8"), ("max", "i8"), ("min", "f4")):
                x = data_of(world.rank, length, dtype)
                log = Log()
                world.hooks.append(log)
                with ledger.record() as book:
                    world.all_reduce(x, op, algorithm=name)
                world.hooks.remove(log)
                assert book.calls["world", "all_reduce"] == 1
                assert book.total_bytes_sent() == book.bytes_sent["world", "send"]
                results[name, length, op, dtype] = x, book.total_bytes_sent(), log.seen
    return results


def chosen():
    """The default algorithm: of the world, of a part, of empty's arrays; then posted, and set anew."""
    world = comm.world()
    x = world.empty(40, "f8")
    x[:] = world.rank + 1
    with ledger.record() as book:
        work = world.all_reduce(x, async_op=True)
        posted = x.copy()
        work.wait()
    part = world.split(0)
    facts = [world.algorithm, part.algorithm, world.in_window(x), posted[0], x[0], book.calls["world", "send"]]
    world.algorithm = "auto"
    y = world.empty(40, "f8")
    return [*facts, world.in_window(y)]


def own_algorithm():
    """MINITORCH_COMM names a function in a file: the sums by it, by its object and posted, and what the ledger, a part
    and a mismatch show of it."""
    world = comm.world()
    function = world.algorithm
    mine = data_of(world.rank, 35, "f8").reshape(5, 7)
    x, y, z, mean = mine.copy(), mine.copy(), mine.copy(), mine.copy()
    with ledger.record() as book:
        world.all_reduce(x)
    world.all_reduce(y, async_op=True).wait()
    world.all_reduce(mean, "mean")
    part = world.split(0)
    world.algorithm = "auto"
    in_window = world.empty((5, 7), "f8")
    in_window[...] = mine
    world.all_reduce(in_window, algorithm=function)
    world.all_reduce(z, algorithm=function)
    shown = None
    try:
        part.all_reduce(np.ones(5), algorithm=function if world.rank == 0 else "ring")
    except comm.MismatchError as error:
        shown = str(error)
    assert function.__globals__["calls"] == (5 if world.size > 1 else 0)
    return ([x, y, z, in_window.copy()], mean, part.algorithm is function, world.in_window(x), book.total_bytes_sent(),
            shown)


def rooted():
    """{(call, root, in the window or op): what this rank has after it}."""
    world = comm.world()
    rank, size = world.rank, world.size
    results = {}
    for root in range(size):
        for window in (True, False):
            for op in OPS:
                x = placed(world, data_of(rank, 1003, "f4"), window)
                work = world.reduce(x, root, op, async_op=op == "max")
                if work is not None:
                    work.wait()
                results["reduce", root, window, op] = x.copy()
        out = np.full((size, 50), np.nan) if rank == root else None
        world.gather(out, data_of(rank, 50, "f8"), root)
        results["gather", root] = out
        whole = np.full((size, 50), np.nan)
        whole[rank] = data_of(rank, 50, "f8")
        world.gather(whole, whole[rank], root, async_op=True).wait()
        results["gather from itself", root] = whole
        x = data_of(rank, 50 * size, "f8").reshape(size, 50) if rank == root else None
        out = np.full(50, np.nan)
        world.scatter(out, x, root)
        results["scatter", root] = out
        whole = data_of(rank, 50 * size, "f8").reshape(size, 50)
        world.scatter(whole[rank], whole, root, async_op=True).wait()
        results["scatter into itself", root] = whole[rank].copy()
        objects = [{"to": to, "text": "ü" * 100 * to} for to in range(size)] if rank == root else None
        results["scatter_object", root] = world.scatter_object(objects, root)
    return results


def rooted_bytes():
    world = comm.world()
    n = 16 * world.size
    x, whole = np.zeros(16, "f4"), np.zeros(n, "f4")
    sent = {}
    for name, run in {"reduce": lambda: world.reduce(whole, 1), "gather": lambda: world.gather(whole, x, 1),
                      "scatter": lambda: world.scatter(x, whole, 1)}.items():
        with ledger.record() as book:
            run()
        sent[name] = book.total_bytes_sent()
    return sent


# ---------------------------------------------------------------- mismatches

def _calls(c, odd):
    """{name: what is called on communicator c}; the odd rank calls something else."""
    x, y, six, whole = np.zeros(8, "f4"), np.zeros(9, "f4"), np.zeros(6, "f4"), np.zeros(8 * c.size, "f4")
    pick = (lambda usual, other: other()) if odd else (lambda usual, other: usual())
    return {
        "shape": lambda: pick(lambda: c.all_reduce(x), lambda: c.all_reduce(y)),
        "same size": lambda: pick(lambda: c.all_reduce(x), lambda: c.all_reduce(x.reshape(2, 4))),
        "dtype": lambda: pick(lambda: c.all_reduce(x), lambda: c.all_reduce(x.view("i4"))),
        "reduction": lambda: pick(lambda: c.all_reduce(x), lambda: c.all_reduce(x, "mean")),
        "algorithm": lambda: pick(lambda: c.all_reduce(x), lambda: c.all_reduce(x, algorithm="ring")),
        "root": lambda: pick(lambda: c.broadcast(x, 0), lambda: c.broadcast(x, 1)),
        "operation": lambda: pick(lambda: c.all_reduce(x), lambda: c.broadcast(x)),
        "gather": lambda: pick(lambda: c.all_gather(whole, x), lambda: c.gather(whole, x)),
        "barrier": lambda: pick(lambda: c.reduce_scatter(x, whole), c.barrier),
        "empty": lambda: pick(lambda: c.empty(3, "f4"), lambda: c.empty(4, "f4")),
        "messages": lambda: c.agree("ring", x.dtype, (8 + odd,), "zigzag"),
        "said in words": lambda: c.agree("ring", x.dtype, x.shape, "contiguous" if odd else "zigzag"),
        "named": lambda: c.all_to_all(six.copy(), six, what="contiguous" if odd else "zigzag"),
        "split": lambda: pick(lambda: c.split(0), lambda: c.all_reduce(x)),
        "posted": lambda: waited(pick(lambda: c.all_reduce(x, async_op=True), lambda: c.all_reduce(y, async_op=True))),
        "posted against not": lambda: pick(lambda: c.all_reduce(x, async_op=True).wait(), lambda: c.all_reduce(x)),
        "third of three": lambda: (c.all_reduce(x), c.barrier(), pick(c.barrier, lambda: c.all_reduce(x))),
    }


def waited(work):
    """In a function of its own: errors name the line that has posted it."""
    work.wait()


def mismatches():
    """{name: what the MismatchError says}, each on a communicator of its own; the last rank is the odd one."""
    world = comm.world()
    messages = {}
    for name in _calls(world, False):
        c = world.split(0, name="part")
        try:
            _calls(c, c.rank == c.size - 1)[name]()
            messages[name] = None
        except comm.MismatchError as error:
            messages[name] = str(error)
            try:
                c.barrier()
                raise AssertionError("a broken communicator went on")
            except comm.MismatchError as again:
                assert again is error
    return messages


def other_pieces():
    """{name: what the MismatchError says} where the last rank passes another piece of the shared array."""
    world = comm.world()
    x, messages = np.zeros(8, "f4"), {}
    calls = {"all_reduce": lambda c, piece: c.all_reduce(piece),
             "all_reduce, posted": lambda c, piece: waited(c.all_reduce(piece, async_op=True)),
             "reduce": lambda c, piece: c.reduce(piece),
             "reduce_scatter": lambda c, piece: c.reduce_scatter(x, piece),
             "all_gather": lambda c, piece: c.all_gather(piece, x)}
    for name, call in calls.items():
        c = world.split(0)
        both = c.empty((2, 8 * c.size), "f4")
        call(c, both[0])
        try:
            call(c, both[int(c.rank == c.size - 1)])
            messages[name] = None
        except comm.MismatchError as error:
            messages[name] = str(error)
    return messages


def many_posted(one_by_one):
    """More collectives posted than there are slots, by rank 0 long before the others, who post all as well or wait for
    each: no false alarm, and no rank that waits in MPI for one that waits in the window."""
    world = comm.world()
    arrays = [placed(world, np.full(10 + i, world.rank + 1.0), window=i % 2 == 0) for i in range(150)]
    if world.rank != 0:
        world.recv(np.zeros(1), 0)
    if world.rank != 0 and one_by_one:
        for x in arrays:
            world.all_reduce(x, async_op=True).wait()
    else:
        works = [world.all_reduce(x, async_op=True) for x in arrays]
        for other in range(1, world.size) if world.rank == 0 else ():
            world.send(np.zeros(1), other)
        for work in works:
            work.wait()
    world.barrier()
    return [x[0] for x in arrays]


def posted_ahead(odd):
    """(collectives posted, the error) where rank 1 means another one by number `odd`; None: all mean the same, and one
    is posted after another until it is refused, and one more when some have been waited for."""
    world, works, error = comm.world().split(0), [], None
    arrays = world.empty((1200, 4), "f4")       # the first collective
    try:
        for number in range(2, 1200 if odd is None else 200):
            op = "max" if number == odd and world.rank == 1 else "sum"
            works.append(world.all_reduce(arrays[number], op, async_op=True))
        for work in works:
            work.wait()
    except RuntimeError as refused:
        error = str(refused)
    if odd is None:
        works[9].wait()
        for number in range(1100, 1110):
            works.append(world.all_reduce(arrays[number], async_op=True))
        for work in works:
            work.wait()
    return len(works), error


def unchecked():
    """With MINITORCH_CHECK=0: the calls work, and a mismatch isn't found."""
    world = comm.world()
    x, y = world.empty(10, "f4"), np.ones(10, "f4")
    x[:] = 1
    for _ in range(3):
        world.all_reduce(x)
        world.all_reduce(y)
        world.barrier()
    world.broadcast(np.zeros(2 if world.rank else 4, "f4")[:2])
    world.broadcast(np.zeros(2, "f4" if world.rank else "i4"))
    found = x[0], y[0]
    world.all_reduce(x, "max" if world.rank == 1 else "sum")
    return found


def repeated():
    """The same small arrays reduced again and again, changed in between: [(result, expected)]."""
    world = comm.world()
    n = world.size
    x = world.empty((6, 50), "f8")
    facts = []
    for step, op in enumerate(["sum", "sum", "mean", "max", "mean", "sum"] * 3):
        x[...] = data_of(world.rank, 300, "f8", step).reshape(x.shape)
        if step == 9:
            posted = world.empty(30, "f8")
            posted[:] = 1
            work = world.all_reduce(posted, async_op=True)
        if step == 12:
            x.resize(300)     # the same array, of another shape
        world.all_reduce(x, op)
        if step == 9:
            work.wait()
            assert (posted == n).all()
        wide = np.array([data_of(rank, 300, "f8", step) for rank in range(n)])
        facts.append((x.reshape(-1).copy(), {"sum": wide.sum(0), "mean": wide.mean(0), "max": wide.max(0)}[op]))
    short = world.empty(37, "f8")
    long = world.empty(100003, "f8")    # several blocks a slice, the last one shorter
    for step, op in enumerate(["sum", "mean", "sum", "mean", "sum", "mean", "min", "mean", "min"]):
        short[...] = data_of(world.rank, short.size, "f8", step)
        long[...] = data_of(world.rank, long.size, "f8", step)
        if step % 2:    # the two of a step are done in the first one's wait, or in the second's
            works = [world.all_reduce(array, op, async_op=True) for array in (short, long)]
            for work in works[::1 if step % 4 == 1 else -1]:
                work.wait()
            wide = np.array([data_of(rank, short.size, "f8", step) for rank in range(n)])
            facts.append((short.copy(), wide.mean(0)))
        else:
            world.all_reduce(long, op)
        wide = np.array([data_of(rank, long.size, "f8", step) for rank in range(n)])
        facts.append((long.copy(), {"sum": wide.sum(0), "mean": wide.mean(0), "min": wide.min(0)}[op]))
    known = len(world._repeated)
    x.flags.writeable = False
    try:
        world.all_reduce(x, "sum")
        known = "wrote to a read-only array"
    except ValueError:
        pass
    turned = world.empty(64, "f8")
    for dtype in ("f8", "i8"):      # the same array, of another dtype; -1 is NaN as a float
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)     # NumPy's, from 2.5 on
            turned.dtype = dtype
        for _ in range(2):
            turned[:] = -1
            world.all_reduce(turned)
            facts.append((turned.copy(), np.full(64, -n, dtype)))
    del x, long, short, posted, work, works, turned
    return facts, known, len(world._repeated)


def remembered_by_one():
    """Sums of a part of an array, which rank 0 passes as one and the same view and the others as ever new ones; the
    first is exact, or by another name; and of a whole one, that rank 0 gives another shape."""
    world, results = comm.world(), []
    whole = world.empty(64, np.float64)
    for setting, first in (("auto", {"exact": True}), ("shared", {"algorithm": "auto"})):
        world.algorithm, view = setting, whole[:32]
        for options in (first, {}, {}, first):
            whole[...] = world.rank + 1
            world.all_reduce(view if world.rank == 0 else whole[:32], **options)
            results.append(float(whole[31]))
        world.algorithm = "auto"
    square = world.empty((8, 8), np.float64)
    for shape in ((8, 8), (8, 8), (64,)):
        if world.rank == 0:
            square.resize(shape)
        square[...] = world.rank + 1
        world.all_reduce(square if world.rank == 0 else square.reshape(shape))
        results.append(float(square.sum()) / 64)
    return results, world.size * (world.size + 1) / 2


def other_counts():
    """What is raised where rank 0 sends rank 1 one row and rank 1 has room for two: at once, and posted, where it is
    waited for twice; and twice by posted reductions of different shapes."""
    world, messages = comm.world(), []
    send, room = [[1] * world.size for _ in range(2)]
    if world.rank == 1:
        room[0] = 2

    def said(call):
        try:
            call()
        except comm.MismatchError as error:
            messages.append(str(error))
    said(lambda: world.all_to_all(np.empty(sum(room)), np.zeros(sum(send)), send, room))
    for work in (world.all_to_all(np.empty(sum(room)), np.zeros(sum(send)), send, room, async_op=True),
                 world.all_reduce(np.zeros(2 + world.rank), async_op=True)):
        said(lambda work=work: until_completed(work))
        said(work.wait)
    return messages


def until_completed(work):
    while not work.is_completed():
        pass
