"""What the ranks do in the tests of errors: each function runs on every rank, and says what it was told."""

import numpy as np

from minitorch_dist import comm
from minitorch_dist.comm.state import state
from minitorch_dist.comm.together import together

from .cases import placed


def timeout_is_error():
    """Rank 0 waits for a reduction that rank 1 posts only later: what it gets told, then the result."""
    world = comm.world()
    messages = []
    for window in (True, False):
        x = placed(world, np.ones(10), window)
        world.barrier()
        if world.rank == 0:
            work = world.all_reduce(x, async_op=True)
            try:
                work.wait(timeout=0.05)
            except TimeoutError as error:
                messages.append(str(error))
            assert state.call is None   # or the watchdog would still take this rank for waiting
            world.send(np.zeros(1), 1)
        else:
            world.recv(np.zeros(1), 0)
            work = world.all_reduce(x, async_op=True)
        work.wait(timeout=20)
        assert (x == 2).all()
    return messages


def wrong_arguments():
    """{what is wrong: (type, message)}; nothing may be sent, so the ranks need not agree."""
    world = comm.world()
    x, n = np.zeros(8), world.size
    read_only = np.zeros(8)
    read_only.flags.writeable = False
    big = np.zeros((n, 4))
    calls = {
        "strided": lambda: world.all_reduce(np.zeros((4, 4))[:, 1]),
        "list": lambda: world.all_reduce([1.0]),
        "objects": lambda: world.broadcast(np.array([None])),
        "op": lambda: world.all_reduce(x, "avg"),
        "op to one": lambda: world.reduce(x, 0, "avg"),
        "op in parts": lambda: world.reduce_scatter(x, np.zeros(8 * n), "avg"),
        "half": lambda: world.all_reduce(x.astype("f2")),
        "byte order": lambda: world.all_reduce(x.astype(">f8")),
        "integer mean": lambda: world.all_reduce(np.zeros(8, "i8"), "mean"),
        "exact max": lambda: world.all_reduce(x, "max", exact=True),
        "exact max in parts": lambda: world.reduce_scatter(x, np.zeros(8 * n), "max", exact=True),
        "root": lambda: world.broadcast(x, n),
        "root of no number": lambda: world.broadcast(x, 1.0),
        "reduce to": lambda: world.reduce(x, n),
        "gather to": lambda: world.gather(None, x, n),
        "scatter from": lambda: world.scatter(x, None, n),
        "object from": lambda: world.broadcast_object(1, n),
        "objects to": lambda: world.gather_object(1, n),
        "objects from": lambda: world.scatter_object([1] * n, n),
        "objects for all": lambda: world.scatter_object([1] * (n + 1), world.rank),
        "negative": lambda: world.send(x, -1),
        "self": lambda: world.send(x, world.rank),
        "recv from": lambda: world.recv(x, n),
        "irecv from self": lambda: world.irecv(x, world.rank),
        "tag": lambda: world.recv(x, (world.rank + 1) % n, tag=32767),
        "tag below": lambda: world.send(x, (world.rank + 1) % n, tag=-1),
        "tag of no number": lambda: world.isend(x, (world.rank + 1) % n, tag=1.0),
        "gather shape": lambda: world.all_gather(np.zeros(8 * n + 1), x),
        "gather dtype": lambda: world.all_gather(np.zeros(8 * n, "f4"), x),
        "scatter shape": lambda: world.reduce_scatter(np.zeros(3), x),
        "overlap": lambda: world.all_gather(big, big[(world.rank + 1) % n]),
        "gathered shape": lambda: world.gather(np.zeros(8 * n + 1), x, world.rank),
        "scattered shape": lambda: world.scatter(np.zeros(3), x, world.rank),
        "row dtype": lambda: world.all_to_all(np.zeros(n), np.zeros(n, "f4")),
        "no rows": lambda: world.all_to_all(np.zeros(()), np.zeros(())),
        "row shape": lambda: world.all_to_all(np.zeros((n, 2)), np.zeros((n, 3))),
        "exchange in place": lambda: world.all_to_all(big, big),
        "rows": lambda: world.all_to_all(np.zeros(n + 1), np.zeros(n + 1)),
        "counts": lambda: world.all_to_all(np.zeros(4), np.zeros(4), [1] * n, [1] * n),
        "counts below": lambda: world.all_to_all(np.zeros(8), x, [-1, 5, 4], [-1, 5, 4]),
        "few counts": lambda: world.all_to_all(np.zeros(8), x, [4, 4], [4, 4]),
        "own count": lambda: world.all_to_all(np.zeros(2 * n), x[:n].copy()),
        "parts": lambda: world.isend_parts([np.zeros(3)], (world.rank + 1) % n),
        "parts of two axes": lambda: world.isend_parts([np.zeros((2, 3), "u1")], (world.rank + 1) % n),
        "parts to": lambda: world.isend_parts([np.zeros(3, "u1")], n),
        "no parts": lambda: world.isend_parts([], (world.rank + 1) % n),
        "wire": lambda: world.all_reduce(x, algorithm=lambda wire, x, combine: wire.send(x, -1)),
        "wire strided": lambda: world.all_reduce(x, algorithm=lambda wire, x, combine: wire.recv(
            x[::2], (wire.rank + 1) % n)),
        "color": lambda: world.split(-1),
        "color of no number": lambda: world.split(1.0),
    }
    after, own, whole, strided = (world.rank + 1) % n, world.rank, np.zeros(8 * n), np.zeros((8 * n, 2))[:, 1]
    written = {
        "all_reduce": world.all_reduce, "reduce": lambda x: world.reduce(x, own),
        "broadcast": lambda x: world.broadcast(x, after), "all_gather": lambda out: world.all_gather(out, x[:0]),
        "reduce_scatter": lambda out: world.reduce_scatter(out, whole), "recv": lambda x: world.recv(x, after),
        "gather": lambda out: world.gather(out, x, own), "scatter": lambda out: world.scatter(out, whole, own),
        "all_to_all": lambda out: world.all_to_all(out, whole), "irecv": lambda x: world.irecv(x, after)}
    read = {
        "all_gather of": lambda x: world.all_gather(whole, x), "gather of": lambda x: world.gather(whole, x, own),
        "reduce_scatter of": lambda x: world.reduce_scatter(np.zeros(8), x), "send": lambda x: world.send(x, after),
        "scatter of": lambda x: world.scatter(np.zeros(8), x, own), "isend": lambda x: world.isend(x, after),
        "all_to_all of": lambda x: world.all_to_all(whole, x)}
    for op, run in (written | read).items():
        calls[f"{op} strided"] = lambda run=run: run(strided)
    for op, run in written.items():
        calls[f"{op} read-only"] = lambda run=run: run(read_only)
    if n == 3:
        calls["exact on 3"] = lambda: world.all_reduce(x, exact=True)
    messages = {}
    for name, run in calls.items():
        try:
            run()
            messages[name] = None
        except (TypeError, ValueError) as error:
            messages[name] = type(error).__name__, str(error)
    return messages


def together_by_one():
    """{kind: what this rank is told where only the last one's work raises it}, and what its work gives otherwise."""
    world, told = comm.world(), {}

    def work(kind=None):
        if kind is not None and world.rank == world.size - 1:
            raise kind("of one rank")
        return world.rank
    for kind in (OSError, ValueError, MemoryError):
        try:
            told[kind.__name__] = together(world, lambda kind=kind: work(kind))
        except kind as error:
            told[kind.__name__] = str(error)
    return told, together(world, work)


def short_message():
    """Rank 0 sends 5 numbers to a rank that expects 6."""
    world = comm.world()
    if world.rank == 0:
        world.send(np.zeros(5), 1)
        return None
    try:
        world.recv(np.zeros(6), 0)
    except RuntimeError as error:
        return str(error)


def long_message():
    """Rank 0 sends 5 numbers, twice, to a rank that expects 3: received at once, and posted."""
    world = comm.world()
    if world.rank == 0:
        world.send(np.zeros(5), 1)
        world.send(np.zeros(5), 1)
        return None
    messages = []
    for receive in (world.recv, lambda x, src: world.irecv(x, src).wait()):
        try:
            receive(np.zeros(3), 0)
        except RuntimeError as error:
            messages.append(str(error))
    return messages
