"""What each rank of `ranks.call` runs: python rank_child.py FOLDER. Reads call.pickle there, writes rank-R.value."""

import importlib
import pickle
import sys
from pathlib import Path


def main(folder):
    with open(folder / "call.pickle", "rb") as file:
        sys.path[:] = pickle.load(file)
        from minitorch_dist.launch_env import default_blas_threads
        default_blas_threads()   # before the arguments below bring in NumPy
        from minitorch_dist import comm
        rank = comm.world().rank
        target, args = pickle.load(file)
    module, name = target.split(":")
    value = getattr(importlib.import_module(module), name)(*args)
    (folder / f"rank-{rank}.value").write_bytes(pickle.dumps(value, protocol=5))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
