"""Softmax cross-entropy: -log softmax(logits)[label] per row, and its gradient, for any number of classes.

With m the largest logit of a row and s = Σ exp(x - m), over the classes:

    loss  = log s + m - x[label]
    x̄[c]  = ct · (exp(x[c] - m) / s - [c = label])

Forward reads every logit once, for m and s grow together: where a new element x exceeds m, the sum so far is scaled by
exp(m - x). So each lane of a program keeps an m and an s of its own, scales once per DEPTH logits, which it has loaded
together, and the lanes meet once per row. Kept for backward are
m and s, 8 bytes per row; backward reads the logits again and makes softmax in registers. Per float32 logit that is 4
bytes in forward and 8 in backward. Separate operations move 32 in forward (maximum, difference, exp, sum, quotient) and
8 in backward, and keep 4; at 50,257 classes this is the largest array of a language model.

Source of the one-pass sum: Milakov & Gimelshein 2018, "Online normalizer calculation for softmax".
"""

import numpy as np
import triton
import triton.language as tl

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
def _forward(logits, labels, loss, largest, total, CLASSES: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr):
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
    label = tl.load(labels + row).to(tl.int32)
    # A label that nobody has checked makes NaN, rather than reading somewhere else.
    right = tl.load(logits + row * CLASSES + label, mask=(label >= 0) & (label < CLASSES), other=float("nan"))
    tl.store(loss + row, (tl.log(sums) + (most - right.to(tl.float32))).to(loss.dtype.element_ty))
    tl.store(largest + row, most)
    tl.store(total + row, sums)


@triton.jit
def _pull(ct, logits, label, largest, total, out, classes, inside):
    """The cotangents of some logits of a row, which `logits` and `out` point to; inside: None where it has them all."""
    x = tl.load(logits + classes, mask=inside).to(tl.float32)
    hit = tl.where(classes == label.to(tl.int32), 1.0, 0.0)
    g = ct.to(tl.float32) * (tl.exp(x - largest) * tl.div_rn(1.0, total) - hit)
    tl.store(out + classes, g.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(ct, logits, labels, largest, total, out, CLASSES: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    whole: tl.constexpr = CLASSES // BLOCK
    label, most, sums, c = tl.load(labels + row), tl.load(largest + row), tl.load(total + row), tl.load(ct + row)
    # Loads without masks, or with masks known when compiling, are under way together; others wait for each other.
    if tl.program_id(1) < whole:
        classes = tl.program_id(1) * BLOCK + lanes
        _pull(c, logits + row * CLASSES, label, most, sums, out + row * CLASSES, classes, None)
    else:
        classes = whole * BLOCK + lanes
        _pull(c, logits + row * CLASSES, label, most, sums, out + row * CLASSES, classes, classes < CLASSES)


def definition(logits, labels):
    """The losses in NumPy."""
    z = logits - logits.max(axis=1, keepdims=True)
    return np.log(np.exp(z).sum(axis=1)) - z[np.arange(len(labels)), labels]


def gradient(ct, logits, labels):
    """The cotangent of the logits in NumPy."""
    e = np.exp(logits - logits.max(axis=1, keepdims=True))
    g = e / e.sum(axis=1, keepdims=True)
    g[np.arange(len(labels)), labels] -= 1
    return g * ct[:, None]


_BLOCKS = tuple({"BLOCK": block, "num_warps": warps} for block, warps in (
    (512, 4), (1024, 4), (1024, 8), (2048, 8), (4096, 8), (4096, 16), (8192, 16)))
_EXAMPLES = ({"*": "fp32", "labels": "i64", "CLASSES": 50257, "BLOCK": 4096, "num_warps": 8},
             {"*": "fp32", "labels": "i32", "CLASSES": 10, "BLOCK": 16, "num_warps": 1},
             {"*": "bf16", "labels": "i64", "CLASSES": 50304, "BLOCK": 4096, "num_warps": 8},
             {"*": "fp16", "labels": "i64"}, {"*": "fp16", "labels": "i64", "CLASSES": 50257, "BLOCK": 4096,
                                              "num_warps": 8})


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
    {"CLASSES": 1000, "BLOCK": 1024, "DEPTH": 2}, examples=tuple(map(_with_depth, _EXAMPLES)), configs=_BLOCKS)
BACKWARD = Kernel(
    "cross_entropy_backward", _backward,
    {"ct": "*", "logits": "*", "labels": "*", "largest": "*fp32", "total": "*fp32", "out": "*"},
    {"CLASSES": 1000, "BLOCK": 1024}, examples=_EXAMPLES, configs=_BLOCKS)
KERNELS = (FORWARD, BACKWARD)


def _block(classes):
    """The options where nothing has been measured: a row of few classes in one block, a long one in pieces."""
    block = min(launch.next_power_of_2(classes), 4096)
    return {"BLOCK": block, "num_warps": 8 if block > 1024 else 4 if block > 128 else 1}


def softmax_cross_entropy(logits, labels):
    """(losses, Kept((maxima, sums))) of logits (n, classes) and labels (n,), int32 or int64 from 0 to classes - 1.

    The losses have the logits' dtype, what is kept is float32 of shape (n,). A label out of range gives NaN.
    """
    logits, labels = launch.contiguous(logits), _labels(labels)
    rows, classes = logits.shape
    loss = launch.empty((rows,), logits.dtype, logits)
    largest, total = (launch.empty((rows,), np.float32, logits) for _ in range(2))

    def run(options):
        FORWARD((rows,), logits, labels, loss, largest, total, CLASSES=classes,
                DEPTH=_depth(classes, 8 * logits.itemsize, **options), **options)
    run(best(FORWARD, (rows, classes), logits, run) or _block(classes))
    return loss, Kept((largest, total))


def pullback(ct, wanted, logits, labels, aux):
    """(the cotangent of the logits,) from the one of the losses."""
    ct, logits, labels = launch.contiguous(ct), launch.contiguous(logits), _labels(labels)
    rows, classes = logits.shape
    out = launch.empty(logits.shape, logits.dtype, logits)

    def run(options):
        grid = rows, launch.cdiv(classes, options["BLOCK"])
        BACKWARD(grid, ct, logits, labels, *aux, out, CLASSES=classes, **options)
    run(best(BACKWARD, (rows, classes), logits, run) or _block(classes))
    return (out,)


def _labels(labels):
    return launch.contiguous(labels if labels.dtype.name in ("int32", "int64") else labels.astype(np.int32))


OPS = {"softmax_cross_entropy": Op(softmax_cross_entropy, pullback, lambda logits, labels: logits.shape[1] > 0)}
