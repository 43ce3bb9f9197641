"""What each rank of a `crew.Crew` runs: python crew_child.py FOLDER. Does call after call until an empty line.

It reads the numbers of calls from the pipe FOLDER/rank-R.orders, each call from FOLDER/call-NUMBER.pickle, and writes
FOLDER/rank-R.value-NUMBER and then a line into the pipe FOLDER/done. Without the empty line the orders end where the
process that gave them is gone; then the folder goes too.
"""

import importlib
import os
import pickle
import shutil
import sys
import warnings
from contextlib import suppress
from pathlib import Path

LOOKS = 10      # for messages: a look that finds none makes MPI fetch them


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
        "settings": {name: value for name, value in os.environ.items() if name.startswith("MINITORCH_")},
        "directory": os.getcwd(), "sys.path": list(sys.path),
    }


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


def do(folder, number, world, backend):
    """One call."""
    target, args = pickle.loads((folder / f"call-{number}.pickle").read_bytes())
    module, name = target.split(":")
    function = getattr(importlib.import_module(module), name)
    before = left_behind(world)
    backend.manual_seed(0)       # as in a process of its own
    value = function(*args)
    after = left_behind(world)
    changed = {what: now for what, now in after.items() if now != before[what]}
    if changed := changed | ({"a message": "that nobody received"} if unreceived(world) else {}):
        raise AssertionError(f"{target} leaves to the next call " + " and ".join(
            f"{what}={now!r}" for what, now in changed.items()))
    part = folder / f"rank-{world.rank}.part"
    part.write_bytes(pickle.dumps(value, protocol=5))
    part.rename(folder / f"rank-{world.rank}.value-{number}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
