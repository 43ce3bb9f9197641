"""Vector add."""

from minitorch_dist.kernels import add

from ..harness import SIZES, Sample, random


def sample(n, *shape, dtype="float32"):
    shape = shape or (n,)
    x, y = (random(*shape, dtype=dtype, seed=seed) for seed in (1, 2))
    return Sample("add", n, add.add, add.definition, (x, y), f"{dtype} {shape}")


SAMPLES = [*(sample(n) for n in SIZES), sample(1025, dtype="float16"), sample(2049, dtype="bfloat16"),
           sample(105, 3, 5, 7), sample(32, 32)]
