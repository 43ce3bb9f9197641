"""What each rank of a `crew.Crew` runs: python crew_child.py FOLDER. Does call after call until an empty line.

It reads the numbers of calls from the pipe FOLDER/rank-R.orders, each call from FOLDER/call-NUMBER.pickle, and writes
FOLDER/rank-R.value-NUMBER and then a line into the pipe FOLDER/done. Without the empty line the orders end where the
process that gave them is gone; then the folder goes too.
"""

import gc
import importlib
import os
import pickle
import random
import shutil
import signal
import sys
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path

LOOKS = 10      # for messages: a look that finds none makes MPI fetch them
THREAD_SECONDS = 10     # for threads to end, on a busy machine
# Modules of which a call may not leave a function or a class replaced, besides the library's own.
KEPT = ("os", "time", "signal", "threading", "mmap", "tempfile", "numpy")
IMPORTED = ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK")     # variables that threadpoolctl sets where it is imported
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGCHLD)


def opened(pipe, mode):
    """A descriptor of a pipe, at once: where nobody is at the other end, nobody will come."""
    descriptor = os.open(pipe, mode | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    return descriptor


def left_behind(world):
    """{what: its value} of what a call could leave to the next one, and should leave as it was."""
    import numpy as np

    from minitorch_dist import backend, ledger
    from minitorch_dist.autodiff.primitive import state
    modes = {f"autodiff's {name}": getattr(state, name) for name in vars(type(state)) if not name.startswith("_")}
    return modes | {
        "a world with hooks": list(world.hooks), "a world with algorithm": world.algorithm,
        "open ledgers": len(ledger.open_ledgers), "ledger.labels": list(ledger.labels), "ledger.clock": ledger.clock,
        "checks put off": len(backend.put_off), "NumPy's errors": np.geterr(), "filters": list(warnings.filters),
        "environment": {name: value for name, value in os.environ.items() if name not in IMPORTED},
        "directory": os.getcwd(), "sys.path": list(sys.path), "sys.argv": sys.argv,
        "handlers of signals": [signal.getsignal(number) for number in SIGNALS],
        "a timer": signal.getitimer(signal.ITIMER_REAL), "sys.stdout and stderr": (sys.stdout, sys.stderr),
        "Python's random numbers": random.getstate(), "NumPy's random numbers": str(np.random.get_state()),
    }


def difference(before, now):
    """What is to be shown of a value that has changed: of a dict the entries that have."""
    if not isinstance(now, dict):
        return now
    return {name: now.get(name) for name in before | now if before.get(name) != now.get(name)}


def threads_since(before):
    """The names of the threads that have begun since then and don't end: workers do when their pool is collected."""
    end = time.monotonic() + THREAD_SECONDS
    while (more := set(threading.enumerate()) - before) and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    return sorted(thread.name for thread in more)


def namespaces():
    """{module: its names} of the modules that must be the same for every call."""
    return {name: dict(vars(module)) for name, module in list(sys.modules.items())
            if name in KEPT or name.partition(".")[0] == "minitorch_dist"}


def replaced(before):
    """Functions and classes of modules that are others now, or gone."""
    return [f"{module}.{name}" for module, names in before.items() for name, value in names.items()
            if callable(value) and getattr(sys.modules.get(module), name, None) is not value]


def unreceived(world):
    """Whether a message waits here. Asked behind a call, before the next one is ordered: at the beginning of one it may
    be from a rank that is ahead."""
    return world.size > 1 and any(world._engine.comm.Iprobe() for _ in range(LOOKS))


def main(folder):
    with open(folder / "call.pickle", "rb") as file:
        sys.path[:] = pickle.load(file)
    from minitorch_dist.launch_env import default_blas_threads
    default_blas_threads()   # before the calls' arguments bring in NumPy
    from minitorch_dist import backend, comm
    world = comm.world()
    done = opened(folder / "done", os.O_WRONLY)
    with open(opened(folder / f"rank-{world.rank}.orders", os.O_RDONLY)) as orders, suppress(BrokenPipeError):
        for number in orders:
            if not number.strip():
                return
            do(folder, number.strip(), world, backend)
            os.write(done, b"\n")
    shutil.rmtree(folder, ignore_errors=True)


def renew(world):
    """The world as it is after a launch: its collectives count from 1, in a window of its own, which a call before this
    one may have left broken."""
    world.__init__(world._engine, world.name, algorithm=os.environ.get("MINITORCH_COMM", "auto"))


def do(folder, number, world, backend):
    """One call."""
    target, args = pickle.loads((folder / f"call-{number}.pickle").read_bytes())
    module, name = target.split(":")
    function = getattr(importlib.import_module(module), name)
    renew(world)
    before, modules, threads = left_behind(world), namespaces(), set(threading.enumerate())
    backend.manual_seed(0)       # as in a process of its own
    value = function(*args)
    after = left_behind(world)
    changed = {what: difference(before[what], now) for what, now in after.items() if now != before[what]}
    more = {"replaced": replaced(modules), "threads": threads_since(threads),
            "a message": "that nobody received" * unreceived(world)}
    if changed := changed | {what: found for what, found in more.items() if found}:
        raise AssertionError(f"{target} leaves to the next call " + " and ".join(
            f"{what}={now!r}" for what, now in changed.items()))
    part = folder / f"rank-{world.rank}.part"
    part.write_bytes(pickle.dumps(value, protocol=5))
    part.rename(folder / f"rank-{world.rank}.value-{number}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
