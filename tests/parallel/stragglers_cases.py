"""What ranks do in the tests of slow ranks."""

import time

import numpy as np

from minitorch_dist import comm, ledger
from minitorch_dist.parallel.stragglers import Stragglers


def reports(seconds, steps, every, algorithm="auto"):
    """([report or None of each step], {op: (calls, bytes)}); in a step rank r sleeps seconds[r], then all reduce."""
    world = comm.world()
    x = np.ones(1000, np.float32)
    with ledger.record() as book:
        watch, found = Stragglers(world, every, factor=2), []       # on a busy machine
        for _ in range(steps):
            time.sleep(seconds[world.rank])
            world.all_reduce(x, op="max", algorithm=algorithm)
            found.append(watch.step())
    return found, {op: (book.calls[axis, op], book.bytes_sent[axis, op]) for axis, op in book.calls}
