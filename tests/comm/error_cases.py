"""What the ranks do in the tests of errors: each function runs on every rank, and says what it was told."""

import numpy as np

from minitorch_dist import comm
from minitorch_dist.comm.state import state

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
        "read-only": lambda: world.all_reduce(read_only),
        "op": lambda: world.all_reduce(x, "avg"),
        "half": lambda: world.all_reduce(x.astype("f2")),
        "byte order": lambda: world.all_reduce(x.astype(">f8")),
        "integer mean": lambda: world.all_reduce(np.zeros(8, "i8"), "mean"),
        "exact max": lambda: world.all_reduce(x, "max", exact=True),
        "root": lambda: world.broadcast(x, n),
        "negative": lambda: world.send(x, -1),
        "self": lambda: world.send(x, world.rank),
        "tag": lambda: world.recv(x, (world.rank + 1) % n, tag=32767),
        "gather shape": lambda: world.all_gather(np.zeros(8 * n + 1), x),
        "gather dtype": lambda: world.all_gather(np.zeros(8 * n, "f4"), x),
        "scatter shape": lambda: world.reduce_scatter(np.zeros(3), x),
        "overlap": lambda: world.all_gather(big, big[(world.rank + 1) % n]),
        "row shape": lambda: world.all_to_all(np.zeros((n, 2)), np.zeros((n, 3))),
        "exchange in place": lambda: world.all_to_all(big, big),
        "rows": lambda: world.all_to_all(np.zeros(n + 1), np.zeros(n + 1)),
        "counts": lambda: world.all_to_all(np.zeros(4), np.zeros(4), [1] * n, [1] * n),
        "own count": lambda: world.all_to_all(np.zeros(2 * n), x[:n].copy()),
        "parts": lambda: world.isend_parts([np.zeros(3)], (world.rank + 1) % n),
        "no parts": lambda: world.isend_parts([], (world.rank + 1) % n),
        "wire": lambda: world.all_reduce(x, algorithm=lambda wire, x, combine: wire.send(x, -1)),
        "wire strided": lambda: world.all_reduce(x, algorithm=lambda wire, x, combine: wire.recv(
            x[::2], (wire.rank + 1) % n)),
        "color": lambda: world.split(-1),
    }
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
