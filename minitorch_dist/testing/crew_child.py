"""What each rank of a `crew.Crew` runs: python crew_child.py FOLDER. Does call after call until its orders end.

It reads the numbers of calls from the pipe FOLDER/rank-R.orders, each call from FOLDER/call-NUMBER.pickle, and writes
FOLDER/rank-R.value-NUMBER and then a line into the pipe FOLDER/done.
"""

import importlib
import os
import pickle
import sys
from pathlib import Path


def main(folder):
    with open(folder / "call.pickle", "rb") as file:
        sys.path[:] = pickle.load(file)
    from minitorch_dist.launch_env import default_blas_threads
    default_blas_threads()   # before the calls' arguments bring in NumPy
    from minitorch_dist import backend, comm
    world = comm.world()
    usual = world.algorithm
    done = os.open(folder / "done", os.O_WRONLY)
    with open(folder / f"rank-{world.rank}.orders") as orders:
        for number in map(str.strip, orders):
            target, args = pickle.loads((folder / f"call-{number}.pickle").read_bytes())
            module, name = target.split(":")
            backend.manual_seed(0)       # as in a process of its own
            value = getattr(importlib.import_module(module), name)(*args)
            if world.hooks or world.algorithm != usual:
                raise AssertionError(f"{target} leaves to the next call a world with hooks={world.hooks} and "
                                     f"algorithm={world.algorithm!r}")
            part = folder / f"rank-{world.rank}.part"
            part.write_bytes(pickle.dumps(value, protocol=5))
            part.rename(folder / f"rank-{world.rank}.value-{number}")
            os.write(done, b"\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
