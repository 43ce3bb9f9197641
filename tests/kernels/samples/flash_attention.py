"""Attention: lengths that are no multiples of a block, heads of any size, shared keys, causal or not, large scores."""

import numpy as np

from minitorch_dist.autodiff.ops.attention import ALL, CAUSAL
from minitorch_dist.backend import to_device_of
from minitorch_dist.kernels import flash_attention as module

from ..harness import Sample, random


def heads_last(x):
    """The same values in memory as (batch, time, heads, size): how heads lie that were split off a row of features."""
    return np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)


def with_blocks(entry, queries, sources):
    """The entry with blocks of other sizes, as the autotuner may choose them."""
    def run(*args):
        usual = module._blocks
        module._blocks = lambda *more: {"QUERIES": queries, "SOURCES": sources}
        try:
            return entry(*args)
        finally:
            module._blocks = usual
    return run


def pair(times, sources, size=16, out=None, batch=1, heads=1, kv_heads=None, causal=False, dtype="float32", scale=None,
         layout=None, label="", tolerance=None, extent=None, blocks=None, documents=None, band=None):
    kv, out, scale = kv_heads or heads, out or size, size ** -0.5 if scale is None else scale
    band = band or (CAUSAL if causal else ALL)
    q, k = random(batch, heads, times, size, dtype=dtype), random(batch, kv, sources, size, dtype=dtype, seed=1)
    v = random(batch, kv, sources, out, dtype=dtype, seed=2)
    ct = random(batch, heads, times, out, dtype=dtype, seed=3)
    if layout:
        q, k, v, ct = map(layout, (q, k, v, ct))
    sees = {ALL: "", CAUSAL: " causal"}.get(band, f" band {band}")
    label = f"{times}x{sources} {size},{out} {heads}/{kv} {dtype}{sees} {label}"

    def beside(q):
        return documents and tuple(to_device_of(each, q) for each in documents)

    def forward(q, k, v):
        return module.flash_attention(q, k, v, band, scale, beside(q))[0]

    def backward(ct, q, k, v):
        kept = module.flash_attention(q, k, v, band, scale, beside(q))[1]
        return plus(module.flash_attention_gradient(ct, q, k, v, band, scale, kept, beside(q)), q, k)

    def gradient(ct, q, k, v):
        return plus(module.gradient(ct, q, k, v, band, scale, documents), q, k)

    def plus(gs, q, k):     # the only source has all the weight, whatever q and k: nothing to be relative to
        return (gs[0] + q, gs[1] + k, gs[2]) if sources == 1 else gs
    if blocks:
        forward, backward = (with_blocks(entry, *blocks) for entry in (forward, backward))
        label += f" blocks of {blocks}"
    extent = extent or max(times, sources)
    return [Sample("flash_attention", extent, forward, lambda *args: module.definition(*args, band, scale, documents),
                   (q, k, v), label.rstrip(), tolerance),
            Sample(" ".join(kernel.name for kernel in module.KERNELS), extent, backward, gradient, (ct, q, k, v),
                   label.rstrip(), tolerance)]


def numbers(batch, *lengths):
    """Stretches of these lengths, in another order in each row: int64 (batch, their sum)."""
    return np.stack([np.repeat(np.arange(len(lengths)), np.roll(lengths, b)) for b in range(batch)])


def mixed(batch, time, count, seed=5):
    """Numbers of documents that don't stand side by side, far from each other."""
    return np.random.default_rng(seed).integers(0, count, (batch, time)) * 2 ** 40 - 2 ** 41


SAMPLES = [
    *pair(1, 1), *pair(31, 31, causal=True), *pair(1025, 31), *pair(31, 1025, causal=True),
    *pair(200, 200, causal=True), *pair(3, 1, extent=1), *pair(130, 70, causal=True), *pair(33, 150),
    *pair(40, 70, batch=2, heads=3), *pair(40, 70, heads=4, kv_heads=2, causal=True), *pair(40, 50, size=5, out=19),
    *pair(40, 50, size=100, causal=True),
    *pair(20, 20, batch=2, heads=2, causal=True, layout=heads_last, label="heads last"),
    *pair(70, 70, causal=True, dtype="float16"), *pair(70, 70, size=32, dtype="bfloat16"),
    *pair(70, 90, causal=True, blocks=(16, 32)), *pair(90, 70, causal=True, blocks=(32, 16)),
    *pair(50, 40, blocks=(16, 32)), *pair(70, 90, heads=2, kv_heads=1, causal=True, blocks=(64, 16)),
    # A score of 1e4 is known to 1e-3 in float32, and so is its weight. Backward is then as good as nothing of q and k.
    pair(40, 50, scale=1e3, label="scores of 1e4", tolerance=2e-3)[0],
    *pair(40, 50, scale=10, label="scores of 100", tolerance=1e-4),
    *pair(70, 70, batch=2, causal=True, documents=(numbers(2, 33, 5, 1, 31),) * 2, label="documents"),
    *pair(100, 100, heads=2, kv_heads=1, documents=(numbers(1, 40, 3, 57),) * 2, label="documents"),
    *pair(90, 90, causal=True, documents=(mixed(1, 90, 4),) * 2, label="documents that are mixed"),
    *pair(70, 70, causal=True, dtype="float16", documents=(numbers(1, 30, 40),) * 2, label="documents"),
    *pair(70, 70, causal=True, documents=(numbers(1, 20, 17, 33),) * 2, blocks=(16, 32), label="documents"),
    *pair(70, 70, causal=True, documents=(mixed(1, 70, 3),) * 2, blocks=(32, 16), label="documents that are mixed"),
    # More numbers than are looked at at once: those in common stand at the end.
    *pair(20, 1100, documents=(numbers(1, 20) + 1, numbers(1, 1060, 40)), label="documents", extent=1100),
    *pair(1100, 20, documents=(numbers(1, 1060, 40), numbers(1, 20) + 1), label="documents", extent=1100),
    # Of parts of a sequence, as a ring has them: some queries see nothing at all.
    *pair(40, 70, documents=(numbers(1, 10, 30), numbers(1, 50, 20) + 1), label="documents of other sources"),
    *pair(200, 200, band=(40, 0)), *pair(130, 130, heads=2, kv_heads=1, band=(1, 0)), *pair(90, 150, band=(20, 30)),
    *pair(150, 90, band=(33, 7), blocks=(16, 32)), *pair(70, 200, band=(5, None), blocks=(32, 16)),
    *pair(70, 70, band=(64, 0), dtype="float16"), *pair(100, 100, size=32, band=(9, 0), dtype="bfloat16"),
    # Of parts of a sequence: an end before oneself, so that some queries see nothing, or none does.
    *pair(70, 90, band=(-20, 60)), *pair(90, 70, band=(80, -30)), *pair(40, 40, band=(-60, 100)),
    *pair(100, 100, batch=2, band=(30, 0), documents=(numbers(2, 20, 47, 33),) * 2, label="documents"),
    *pair(90, 90, band=(40, 5), documents=(mixed(1, 90, 4),) * 2, label="documents that are mixed"),
]
