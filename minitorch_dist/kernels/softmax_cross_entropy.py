"""Softmax cross-entropy: -log softmax(logits)[label] per row, and its gradient, for any number of classes.

With m the largest logit of a row and s = Σ exp(x - m), over the classes:

    loss  = log s + m - x[label]
    x̄[c]  = ct · (exp(x[c] - m) / s - [c = label])

A row whose label is `ignore` has loss 0 and cotangents of 0, whatever its logits are.

Forward reads every logit once, for m and s grow together: where a new element x exceeds m, the sum so far is scaled by
exp(m - x). So each lane of a program keeps an m and an s of its own, scales once per DEPTH logits, which it has loaded
together, and the lanes meet once per row. Kept for backward are
m and s, 8 bytes per row; backward reads the logits again and makes softmax in registers. Per float32 logit that is 4
bytes in forward and 8 in backward. Separate operations move 32 in forward (maximum, difference, exp, sum, quotient) and
8 in backward, and keep 4; at 50,257 classes this is the largest array of a language model.

The same kernels make the tiles of linear_cross_entropy (backend/tiled_cross_entropy.py), m and s growing from tile to
tile.

Source of the one-pass sum: Milakov & Gimelshein 2018, "Online normalizer calculation for softmax".
"""

import numpy as np
import triton
import triton.language as tl

from ..backend.tiled_cross_entropy import rules
from . import Kept, Op, launch
from .autotune import best
from .kernel import Kernel

LOWEST = tl.constexpr(-3.0e38)      # where a row's maximum starts: finite, so that no difference is NaN


@triton.jit
def _grown(m, s, x):
    """The lanes' maxima and sums with a tile x (depth, lanes) of logits more."""
    larger = tl.maximum(m, tl.max(x, axis=0))
    return larger, s * tl.exp(m - larger) + tl.sum(tl.exp(x - larger[None, :]), axis=0)


@triton.jit
def _forward(logits, labels, loss, largest, total, CLASSES: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
             IGNORE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes: tl.constexpr = BLOCK // DEPTH
    whole: tl.constexpr = CLASSES // BLOCK * BLOCK
    classes = tl.arange(0, DEPTH)[:, None] * lanes + tl.arange(0, lanes)[None, :]
    at = logits + row * CLASSES + classes
    m = tl.full((lanes,), LOWEST, tl.float32)
    s = tl.zeros((lanes,), tl.float32)
    for start in range(0, whole, BLOCK):
        m, s = _grown(m, s, tl.load(at + start).to(tl.float32))
    if whole < CLASSES:
        m, s = _grown(m, s, tl.load(at + whole, mask=whole + classes < CLASSES, other=-float("inf")).to(tl.float32))
    most = tl.max(m, axis=0)
    sums = tl.sum(s * tl.exp(m - most), axis=0)
    label = tl.load(labels + row).to(tl.int64)
    # A label that nobody has checked makes NaN, rather than reading somewhere else.
    right = tl.load(logits + row * CLASSES + label, mask=(label >= 0) & (label < CLASSES), other=float("nan"))
    value = tl.log(sums) + (most - right.to(tl.float32))
    if IGNORE is not None:
        value = tl.where(label == IGNORE, 0.0, value)
    tl.store(loss + row, value.to(loss.dtype.element_ty))
    tl.store(largest + row, most)
    tl.store(total + row, sums)


@triton.jit
def _pull(ct, logits, label, largest, total, out, classes, inside, IGNORE: tl.constexpr):
    """The cotangents of some logits of a row, which `logits` and `out` point to; inside: None where it has them all."""
    x = tl.load(logits + classes, mask=inside).to(tl.float32)
    hit = tl.where(classes == label.to(tl.int32), 1.0, 0.0)
    g = ct.to(tl.float32) * (tl.exp(x - largest) * tl.div_rn(1.0, total) - hit)
    if IGNORE is not None:
        g = tl.where(label == IGNORE, 0.0, g)
    tl.store(out + classes, g.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(ct, logits, labels, largest, total, out, CLASSES: tl.constexpr, BLOCK: tl.constexpr,
              IGNORE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    whole: tl.constexpr = CLASSES // BLOCK
    label, most, sums = tl.load(labels + row).to(tl.int64), tl.load(largest + row), tl.load(total + row)
    c = tl.load(ct + row)
    # Loads without masks, or with masks known when compiling, are under way together; others wait for each other.
    if tl.program_id(1) < whole:
        classes = tl.program_id(1) * BLOCK + lanes
        _pull(c, logits + row * CLASSES, label, most, sums, out + row * CLASSES, classes, None, IGNORE)
    else:
        classes = whole * BLOCK + lanes
        _pull(c, logits + row * CLASSES, label, most, sums, out + row * CLASSES, classes, classes < CLASSES,
              IGNORE)


def definition(logits, labels, ignore=None):
    """The losses in NumPy."""
    z, counted = logits - logits.max(axis=1, keepdims=True), labels != ignore
    losses = np.log(np.exp(z).sum(axis=1)) - z[np.arange(len(labels)), np.where(counted, labels, 0)]
    return np.where(counted, losses, 0)


def gradient(ct, logits, labels, ignore=None):
    """The cotangent of the logits in NumPy."""
    counted, e = labels != ignore, np.exp(logits - logits.max(axis=1, keepdims=True))
    g = e / e.sum(axis=1, keepdims=True)
    g[np.arange(len(labels)), np.where(counted, labels, 0)] -= 1
    return np.where(counted[:, None], g * ct[:, None], 0)


_BLOCKS = tuple({"BLOCK": block, "num_warps": warps} for block, warps in (
    (512, 4), (1024, 4), (1024, 8), (2048, 8), (4096, 8), (4096, 16), (8192, 16)))
_EXAMPLES = ({"*": "fp32", "labels": "i64", "CLASSES": 50257, "BLOCK": 4096, "num_warps": 8},
             {"*": "fp32", "labels": "i32", "CLASSES": 10, "BLOCK": 16, "num_warps": 1},
             {"*": "bf16", "labels": "i64", "CLASSES": 50304, "BLOCK": 4096, "num_warps": 8},
             {"*": "fp16", "labels": "i64"},
             {"*": "fp16", "labels": "i64", "CLASSES": 50257, "BLOCK": 4096, "num_warps": 8, "IGNORE": -100})


def _depth(classes, bits, BLOCK, num_warps):
    """How many logits of a block a thread loads in different rows of its tile: as many as leave it the lanes that it
    can load at once, up to 128 bits where rows begin at multiples of that."""
    wide = min(128 // bits, classes & -classes)
    return max(1, BLOCK // (32 * num_warps * wide))


def _with_depth(example):
    bits = {"fp32": 32}.get(example["*"], 16)
    given = {"CLASSES": 1000, "BLOCK": 1024, "num_warps": 4} | example
    return example | {"DEPTH": _depth(given["CLASSES"], bits, given["BLOCK"], given["num_warps"])}


FORWARD = Kernel(
    "cross_entropy", _forward, {"logits": "*", "labels": "*", "loss": "*", "largest": "*fp32", "total": "*fp32"},
    {"CLASSES": 1000, "BLOCK": 1024, "DEPTH": 2, "IGNORE": None}, examples=tuple(map(_with_depth, _EXAMPLES)),
    configs=_BLOCKS)
BACKWARD = Kernel(
    "cross_entropy_backward", _backward,
    {"ct": "*", "logits": "*", "labels": "*", "largest": "*fp32", "total": "*fp32", "out": "*"},
    {"CLASSES": 1000, "BLOCK": 1024, "IGNORE": None}, examples=_EXAMPLES, configs=_BLOCKS)
KERNELS = (FORWARD, BACKWARD)


def _block(classes):
    """The options where nothing has been measured: a row of few classes in one block, a long one in pieces."""
    block = min(launch.next_power_of_2(classes), 4096)
    return {"BLOCK": block, "num_warps": 8 if block > 1024 else 4 if block > 128 else 1}


def softmax_cross_entropy(logits, labels, ignore=None):
    """(losses, Kept((maxima, sums))) of logits (n, classes) and labels (n,): integers, 0 … classes-1 or `ignore`.

    The losses have the logits' dtype, what is kept is float32 of shape (n,). A label out of range gives NaN.
    """
    logits, labels = launch.contiguous(logits), launch.contiguous(labels)
    rows, classes = logits.shape
    loss = launch.empty((rows,), logits.dtype, logits)
    largest, total = (launch.empty((rows,), np.float32, logits) for _ in range(2))

    def run(options):
        FORWARD((rows,), logits, labels, loss, largest, total, CLASSES=classes, IGNORE=ignore,
                DEPTH=_depth(classes, 8 * logits.itemsize, **options), **options)
    run(best(FORWARD, (rows, classes), logits, run) or _block(classes))
    return loss, Kept((largest, total))


def pullback(ct, wanted, logits, labels, ignore, aux):
    """(the cotangent of the logits,) from the one of the losses."""
    ct, logits, labels = launch.contiguous(ct), launch.contiguous(logits), launch.contiguous(labels)
    rows, classes = logits.shape
    out = launch.empty(logits.shape, logits.dtype, logits)

    def run(options):
        grid = rows, launch.cdiv(classes, options["BLOCK"])
        BACKWARD(grid, ct, logits, labels, *aux, out, CLASSES=classes, IGNORE=ignore, **options)
    run(best(BACKWARD, (rows, classes), logits, run) or _block(classes))
    return (out,)


def fits(logits, labels, ignore=None):
    """Whether there are classes, and `ignore` is a number that the kernels can compare."""
    return logits.shape[1] > 0 and (ignore is None or -2 ** 63 <= ignore < 2 ** 63)


def _tile_sums(z, labels):
    return softmax_cross_entropy(z, labels)[1]


def _tile_slopes(ct, z, labels, largest, total):
    return pullback(ct, (True,), z, labels, None, (largest, total))[0]


# linear_cross_entropy, with these kernels for each tile of logits. A label in another tile is out of range there: the
# tile's own losses are NaN, and not used.
tiled, tiled_pullback = rules(_tile_sums, _tile_slopes, Kept)


def tiled_fits(x, weight, labels, ignore, wide, shares):
    """Whether there are logits, of x's dtype."""
    return x.dtype == weight.dtype and len(x) > 0 and fits(weight.T, labels, ignore)


OPS = {"softmax_cross_entropy": Op(softmax_cross_entropy, pullback, fits),
       "linear_cross_entropy": Op(tiled, tiled_pullback, tiled_fits)}
