"""What your compiled kernels ask of a GPU's memory, counted on an emulated one: no GPU needed, only Triton.

    python exercises/26_attention_kernels/count.py            # yours where they have passed, else ours
    python exercises/26_attention_kernels/count.py --ours     # ours
"""

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"      # compile, don't interpret; Triton asks when it is imported
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np  # noqa: E402

from exercises.frame import compiled  # noqa: E402

EDGE, TIME, SIZE, BLOCK = 64, 128, 32, (32, 32)


def calls(modules):
    """(what is called, how many pairs of numbers are multiplied, or scores made; the call) in turn."""
    from minitorch_dist.kernels.emulator import aligned
    rng = np.random.default_rng(0)

    def normal(*shape):
        return aligned(rng.standard_normal(shape, np.float32))
    x, y, out = normal(EDGE, EDGE), normal(EDGE, EDGE), normal(EDGE, EDGE)
    for tile in (16, 32, 64):
        yield (f"matmul, tiles of {tile} × {tile}", EDGE ** 3,
               lambda tile=tile: modules["matmul"].matmul(x, y, out, (tile, tile, 16)))
    q, k, v, made, bar, *bars = (normal(1, TIME, SIZE) for _ in range(8))
    lse, D = normal(1, TIME), normal(1, TIME)
    yield "attention", TIME ** 2, lambda: modules["attention"].attention(q, k, v, made, lse, SIZE ** -0.5, BLOCK)
    yield "attention_backward", TIME ** 2, lambda: modules["attention_backward"].attention_backward(
        q, k, v, made, lse, bar, *bars, D, SIZE ** -0.5, BLOCK)


if __name__ == "__main__":
    sys.exit(compiled.count("26", calls, "Per multiply-add, and of attention per score", "--ours" in sys.argv[1:]))
