"""Sums of rows by index: long, short and empty segments, odd rows, every dtype, indices from the end."""

import math

import numpy as np

from minitorch_dist.kernels import segment_sums as module

from ..harness import SIZES, Sample, random


def indices(n, rows, seed=3, long=0.0):
    """n of them below `rows`; a part `long` of them is row 1, and the last row has none."""
    rng = np.random.default_rng([seed, n, rows])
    index = rng.integers(0, max(1, rows - 1), n)
    return np.where(rng.random(n) < long, min(1, rows - 1), index)


def sample(n, rows, *shape, dtype="float32", index=None, label="", sort=False, **options):
    index = indices(n, rows, **options) if index is None else index

    def entry(g, index):
        before, module.SMALL = module.SMALL, 0 if sort else module.SMALL
        try:
            return module.segment_sums(g, index, rows)
        finally:
            module.SMALL = before
    label += " sorted" * sort
    return Sample("segment_sums" if sort else "segment_order segment_sums", math.prod(shape), entry,
                  lambda g, index: module.definition(g, index, rows),
                  (random(n, *shape, dtype=dtype), index), f"{n} into {rows} of {shape} {dtype} {label}")


SAMPLES = [
    *(sample(37, 5, size) for size in SIZES), *(sample(n, 7, 3) for n in (1, 31, 300)),
    sample(300, 3, 33, long=0.9),
    sample(5, 40, 2, 3), sample(29, 4), sample(40, 1, 5), sample(70, 4, 33, dtype="float16"),
    sample(70, 4, 33, dtype="bfloat16"), sample(320, 3, 5, dtype="float64", long=0.9),
    *(sample(9, 50, size, long=0.5, label="few of many rows") for size in SIZES), sample(1, 2), sample(31, 1025, 1),
    sample(40, 41, 3, long=0.95, dtype="float64"), sample(40, 70, 33, dtype="bfloat16", long=0.5),
    sample(20, 6, 7, index=indices(20, 6) - 6, label="from the end"), sample(40, 51, 7),
    *(sample(n, 7, 3, sort=True) for n in (1, 1025)), sample(40, 70, 33, sort=True, long=0.5),
    sample(20, 6, 7, index=indices(20, 6) - 6, label="from the end", sort=True),
    sample(200, 6, 7, index=indices(200, 6).astype(np.uint8), label="uint8"),
    sample(20, 6, 7, index=np.full(20, 5), label="one row"),
    sample(6, 6, 7, index=np.array([3, 1, 5, 0, 2, 4]), label="once each"),
    # Multiples of 16: 128 bits at a time.
    sample(64, 5, 32), sample(96, 2, 144, long=0.9), sample(48, 60, 32, long=0.5), sample(32, 6, 64, dtype="float16"),
    sample(320, 2, 16, dtype="bfloat16"), sample(64, 5, 32, dtype="float64", sort=True),
]
