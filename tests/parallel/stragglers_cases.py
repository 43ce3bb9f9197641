"""What ranks do in the tests of slow ranks."""

import time

import numpy as np

from minitorch_dist import comm, ledger
from minitorch_dist.parallel.stragglers import Stragglers


def reports(seconds, steps, every, algorithm="auto", stages=None):
    """([report or None of each step], {op: (calls, bytes)}); in a step rank r sleeps seconds[r], then all reduce.
    stages: of a pipeline, on whose ranks the work is the same."""
    world = comm.world()
    peers = comm.DeviceMesh(world, dp=-1, pp=stages)["dp"] if stages else None
    x = np.ones(1000, np.float32)
    with ledger.record() as book:
        watch, found = Stragglers(world, every, factor=2, peers=peers), []       # on a busy machine
        for _ in range(steps):
            time.sleep(seconds[world.rank])
            world.all_reduce(x, op="max", algorithm=algorithm)
            found.append(watch.step())
    return found, {op: (book.calls[axis, op], book.bytes_sent[axis, op]) for axis, op in book.calls}
