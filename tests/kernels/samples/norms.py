"""Layer norm and RMS norm: with and without weight and bias, over one axis and over two, more rows than programs."""

import numpy as np

from minitorch_dist.kernels import norms as module

from ..harness import Sample, random

EPS = 1e-5


def few_programs(module, entry):
    """A module's entry with backward's rows shared by three programs, so that each has a stripe of several tiles."""
    def run(*args):
        before, module.PROGRAMS = module.PROGRAMS, 3
        try:
            return entry(*args)
        finally:
            module.PROGRAMS = before
    return run


def affine(shape, dtype, weight, bias):
    return [random(*shape, dtype=dtype, seed=seed) if has else None for seed, has in ((5, weight), (6, bias))]


def layer(shape, n=1, dtype="float32", weight=True, bias=True, scale=None, few=False):
    w, b = affine(shape[-n:], dtype, weight, bias)
    x = random(*shape, dtype=dtype) * (1 if scale is None else np.float32(scale))
    label = f"layer {shape} {dtype}" + " no weight" * (not weight) + " no bias" * (not bias) + " stripes" * few
    label += "" if scale is None else f" times {scale:g}"
    wanted = True, weight, bias

    def forward(x, w, b):
        return module.layer_norm(x, w, b, n, EPS)[0]

    def backward(ct, x, w, b):
        return module.layer_norm_pullback(ct, wanted, x, w, n, module.layer_norm(x, w, b, n, EPS)[1])

    def gradient(ct, x, w, b):
        return tuple(g if asked else None for g, asked in zip(module.gradient(ct, x, w, n, EPS), wanted, strict=True))
    size = int(np.prod(shape[-n:]))
    names = "norm norm_backward" + (" column_sums" if weight or bias else "")
    return [Sample("norm", size, forward, lambda x, w, b: module.definition(x, w, b, n, EPS), (x, w, b), label),
            Sample(names, size, few_programs(module, backward) if few else backward, gradient,
                   (random(*shape, dtype=dtype, seed=7), x, w, b), label)]


def rms(shape, n=1, dtype="float32", weight=True, eps=EPS):
    w, _ = affine(shape[-n:], dtype, weight, False)
    x = random(*shape, dtype=dtype)
    label = f"rms {shape} {dtype}" + ("" if weight else " no weight")

    def forward(x, w):
        return module.rms_norm(x, w, n, eps)[0]

    def backward(ct, x, w):
        return module.rms_norm_pullback(ct, (True, weight), x, w, n, module.rms_norm(x, w, n, eps)[1])

    def gradient(ct, x, w):
        gx, gw, _ = module.gradient(ct, x, w, n, eps, False)
        return gx, gw if weight else None
    size = int(np.prod(shape[-n:]))
    return [Sample("norm", size, forward, lambda x, w: module.definition(x, w, None, n, eps, False), (x, w), label),
            Sample("norm norm_backward" + (" column_sums" if weight else ""), size, backward, gradient,
                   (random(*shape, dtype=dtype, seed=7), x, w), label)]


def weights_alone(shape):
    """x wants no cotangent: only weight and bias do."""
    def entry(ct, x, w, b):
        return module.layer_norm_pullback(ct, (False, True, True), x, w, 1, module.layer_norm(x, w, b, 1, EPS)[1])
    return Sample("norm norm_backward column_sums", shape[-1], entry,
                  lambda ct, x, w, b: (None, *module.gradient(ct, x, w, 1, EPS)[1:]),
                  (random(*shape, seed=7), random(*shape), *affine(shape[-1:], "float32", True, True)), "weights alone")


SAMPLES = [
    *layer((3, 1)), *layer((70, 31)), *layer((5, 1025)), *layer((2, 3, 4, 5), n=2), *layer((9, 33), weight=False),
    *layer((9, 33), weight=False, bias=False), *layer((9, 33), bias=False), *layer((4, 3, 33), dtype="float16"),
    *layer((4, 33), dtype="bfloat16"), *layer((300, 33), few=True), *layer((5, 65), scale=1e4),
    *rms((3, 1), eps=0.5), *rms((70, 31)), *rms((5, 1025)), *rms((2, 3, 4, 5), n=2), *rms((9, 33), weight=False),
    *rms((4, 33), dtype="bfloat16"), weights_alone((9, 33)),
    # Rows of multiples of 16 elements: a GPU loads them 128 bits at a time, several tiles ahead.
    *layer((300, 64), few=True), *layer((30, 1024), few=True), *layer((7, 4096), few=True),
    *layer((7, 8192), weight=False, bias=False, few=True), *layer((70, 256), dtype="float16", few=True),
    *layer((9, 48), dtype="bfloat16"), *rms((9, 2048)),
]
