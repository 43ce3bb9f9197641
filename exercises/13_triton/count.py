"""What your compiled kernels ask of a GPU's memory, counted on an emulated one: no GPU needed, only Triton.

    python exercises/13_triton/count.py            # yours where they have passed, else ours
    python exercises/13_triton/count.py --ours     # ours

A warp, 32 threads, gets memory in sectors of 32 bytes: of each it moves the whole, whatever it needs of it. What it
asks for again may still lie in a cache; "at least" counts each sector once.
"""

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"      # compile, don't interpret; Triton asks when it is imported
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np  # noqa: E402

from exercises.frame import compiled  # noqa: E402

ELEMENTS, ROWS, COLUMNS = 8192, 16, 1000


def calls(modules):
    """(what is called, how many elements it works on, the call) in turn."""
    from minitorch_dist.kernels.emulator import aligned
    rng = np.random.default_rng(0)

    def normal(*shape):
        return aligned(rng.standard_normal(shape, np.float32))
    x, y, out = normal(ELEMENTS), normal(ELEMENTS), normal(ELEMENTS)
    every_second = normal(2 * ELEMENTS)[::2]
    yield "add", ELEMENTS, lambda: modules["add"].add(x, y, out)
    yield "add, x is a[::2]", ELEMENTS, lambda: modules["add"].add(every_second, y, out)
    rows, made = normal(ROWS, COLUMNS), normal(ROWS, COLUMNS)
    yield "softmax", rows.size, lambda: modules["softmax"].softmax(rows, made)
    p, g = normal(ELEMENTS), normal(ELEMENTS)
    yours = modules["adam"].Adam(p, g, [ELEMENTS // 3, ELEMENTS], [0.0, 0.01])
    for name, state in vars(yours).items():         # where CuPy's arrays would begin
        if isinstance(state, np.ndarray):
            setattr(yours, name, aligned(state))
    yield "adam", ELEMENTS, yours.step


if __name__ == "__main__":
    sys.exit(compiled.count("13", calls, "Per element", "--ours" in sys.argv[1:]))
