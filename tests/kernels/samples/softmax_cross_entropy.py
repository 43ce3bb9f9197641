"""Losses and their gradients: rows of one class up to several blocks, logits of ±1e4, every dtype of labels."""

import numpy as np

from minitorch_dist.kernels import softmax_cross_entropy as module

from ..harness import Sample, random


def labels(rows, classes, dtype):
    return np.random.default_rng(rows + classes).integers(0, classes, rows).astype(dtype)


def ignored(numbers, ignore):
    """The first number, and every third behind it, are `ignore`."""
    if ignore is not None:
        numbers[::3] = ignore
    return numbers


def forward(rows, classes, dtype="float32", integer="int64", scale=1, label="", ignore=None):
    def entry(logits, numbers, ignore):
        return module.softmax_cross_entropy(logits, numbers, ignore)[0]
    logits = random(rows, classes, dtype=dtype)
    return Sample("cross_entropy", classes, entry, module.definition,
                  (logits if scale == 1 else logits * logits.dtype.type(scale),
                   ignored(labels(rows, classes, integer), ignore), ignore),
                  label or f"{rows} rows {dtype} {integer}")


def backward(rows, classes, dtype="float32", integer="int64", scale=1, label="", ignore=None):
    def entry(ct, logits, numbers, ignore):
        kept = module.softmax_cross_entropy(logits, numbers, ignore)[1]
        return module.pullback(ct, (True,), logits, numbers, ignore, kept)
    logits = random(rows, classes, dtype=dtype)
    return Sample("cross_entropy cross_entropy_backward", classes, entry, lambda *args: (module.gradient(*args),),
                  (random(rows, dtype=dtype, seed=9), logits if scale == 1 else logits * logits.dtype.type(scale),
                   ignored(labels(rows, classes, integer), ignore), ignore),
                  label or f"{rows} rows {dtype} {integer}")


SAMPLES = [make(*shape, **more) for make in (forward, backward) for shape, more in (
    ((3, 1), {}), ((7, 31), {"integer": "int32"}), ((5, 1025), {}), ((2, 5000), {}), ((7, 10), {"integer": "uint8"}),
    ((3, 4099), {"dtype": "float16"}), ((3, 1025), {"dtype": "bfloat16"}),
    ((5, 1025), {"scale": 1e4, "label": "logits of 1e4"}),
    ((7, 31), {"ignore": -100, "label": "some ignored"}), ((1, 5), {"ignore": 3, "label": "all ignored"}),
    ((5, 5000), {"dtype": "float16", "integer": "int32", "ignore": -1, "label": "some ignored of 16 bits"}),
    # Rows that begin at multiples of 16 bytes: 128 bits at a time.
    ((5, 1024), {}), ((3, 9232), {}), ((3, 9232), {"dtype": "float16"}), ((7, 64), {"dtype": "bfloat16"}))]
