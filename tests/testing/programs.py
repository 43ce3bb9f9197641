"""What the ranks do in the tests of testing/ranks.py and testing/crew.py."""

import atexit
import os
import re
import sys
import threading
import time

import numpy as np

from minitorch_dist import backend, comm


def rank_and(*args):
    print("out", comm.world().rank)
    print("err", comm.world().rank, file=sys.stderr)
    return comm.world().rank, args, os.environ.get("OPENBLAS_NUM_THREADS")


def fails_on(rank):
    if comm.world().rank == rank:
        raise KeyError("this key")
    comm.world().barrier()


def never_comes():
    """Rank 0 sleeps, rank 1 waits for its message, rank 2 for everybody."""
    world = comm.world()
    if world.rank == 0:
        time.sleep(100)
    elif world.rank == 1:
        world.recv(np.zeros((2, 3), "f4"), 0, tag=5)
    else:
        world.all_reduce(np.zeros(7))


def leaves_without_a_value():
    sys.exit(0)


def fails_at_the_exit():
    atexit.register(os._exit, 5)


def draws():
    return float(backend.next_stream().random()),


def leaves_a_hook():
    comm.world().hooks.append(None)


def leaves_a_message():
    world = comm.world()
    world.all_reduce(np.zeros(1))
    if world.rank == 0:
        world.isend(np.zeros(1), 1, tag=3)
    world.barrier()
    time.sleep(0.2)


def leaves_a_variable():
    os.environ["MINITORCH_COLOUR"] = "blue"


def leaves_a_function():
    os.posix_fallocate = print


def leaves_a_thread():
    threading.Thread(target=time.sleep, args=(100,), name="sleeper", daemon=True).start()


def draws_for_all():
    np.random.random()


def breaks_the_world():
    """The number of the collective that the ranks don't agree on."""
    world = comm.world()
    world.barrier()
    try:
        world.all_reduce(np.zeros(1 + world.rank))
    except comm.MismatchError as error:
        return int(re.search("collective number ([0-9]+)", str(error))[1])


def leaves_numbers():
    """In memory that the next call gets."""
    for array in [np.full(5000, 7.0) for _ in range(50)]:
        del array


def finds_numbers():
    return max(np.count_nonzero(array == 7.0) for array in [np.empty(5000) for _ in range(50)])
