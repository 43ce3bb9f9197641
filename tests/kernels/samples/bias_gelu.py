"""Bias and GELU, both forms, with and without a bias."""

from minitorch_dist.kernels import bias_gelu as module

from ..harness import Sample, random
from .norms import few_programs


def pair(shape, dtype="float32", bias=True, approximate="none", scale=1, few=False):
    x, ct = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=7)
    x = x if scale == 1 else x * x.dtype.type(scale)
    b = random(shape[-1], dtype=dtype, seed=5) if bias else None
    label = f"{shape} {dtype} {approximate}" + " no bias" * (not bias) + " stripes" * few
    label += "" if scale == 1 else f" times {scale:g}"

    def backward(*args):
        return module.bias_gelu_gradient(*args, approximate)
    return [Sample("bias_gelu", shape[-1], lambda *args: module.bias_gelu(*args, approximate),
                   lambda *args: module.definition(*args, approximate), (x, b), label),
            Sample("bias_gelu_backward" + (" column_sums" if bias else ""), shape[-1],
                   few_programs(module, backward) if few else backward,
                   lambda *args: module.gradient(*args, approximate), (ct, x, b), label)]


SAMPLES = [
    *pair((7, 1)), *pair((3, 5, 31)), *pair((6, 1025)), *pair((3, 31), approximate="tanh"), *pair((1,), bias=False),
    *pair((31,), bias=False, approximate="tanh"), *pair((1025,), bias=False), *pair((3, 5, 7), bias=False),
    *pair((70, 33), few=True), *pair((9, 33), "float16"), *pair((9, 33), "bfloat16", approximate="tanh"),
    *pair((5, 33), scale=1e4), *pair((5, 33), scale=1e4, approximate="tanh"),
    # Multiples of 16: 128 bits at a time.
    *pair((70, 64), few=True), *pair((70, 512), "float16", approximate="tanh", few=True), *pair((9, 48), "bfloat16"),
    *pair((2048,), bias=False, approximate="tanh"), *pair((3, 5, 32), "float16", bias=False),
]
