"""-log softmax(x Wᵀ)[label] without the logits, the largest array of a language model: by tiles of some classes.

    forward    z = x W_tileᵀ     m, s and z[label] take it in
    backward   z = x W_tileᵀ     g = ct · (exp(z - m) / s - [class = label])     x̄ += g W_tile     W̄_tile = gᵀ x

m is a row's largest logit, s its Σ exp(z - m): these two are kept, 8 bytes per row, where logits of V classes and their
softmax take 8·V in float32. One tile exists at a time. The price is one product of four: backward makes the logits
again. Where each rank has a share of the classes, m, s and z[label] are brought together between the two. All arrays
here are raw.

Source: Wijmans et al. 2024, "Cut your losses in large-vocabulary language models".
"""

import numpy as xp

from .devices import on_host
from .dtypes import is_short
from .halves import to_float32
from .passes import choose
from .products import matmul

HOST, GPU = 1 << 23, 1 << 25        # elements of a tile
STEP = 64                           # classes that a tile has a multiple of; four times as many at least


def counted_labels(labels, ignore):
    """(which labels count, None for all of them; the labels, 0 where they don't)."""
    if ignore is None:
        return None, labels
    counted = labels != ignore
    return counted, xp.where(counted, labels, 0)


def tiles(rows, classes, most):
    """[(first class, end)]: tiles of up to `most` elements, all but the last of one width."""
    width = max(4 * STEP, most // max(1, rows) // STEP * STEP)
    return [(at, min(at + width, classes)) for at in range(0, classes, width)]


def _tiles(x, weight):
    return tiles(len(x), len(weight), HOST if on_host(x) else GPU)


def _wide(z):
    """Floats of 16 bits in float32, in which exponentials are made and added up; others as they are."""
    return to_float32(z) if is_short(z.dtype) else z


def sums(z, labels):
    """(the largest, Σ exp(z - the largest)) of each row; z is used up."""
    z = _wide(z)
    largest = z.max(axis=1)
    z -= largest[:, None]
    return largest, xp.exp(z, out=z).sum(axis=1)


def slopes(ct, z, labels, largest, total):
    """The cotangents of a tile of logits, which is used up; labels count from its first class."""
    out = _wide(z)
    out -= largest[:, None]
    xp.exp(out, out=out)
    out *= (ct / total)[:, None]
    inside, rows, at = _within(labels, out)
    out[rows, at] -= choose(inside, ct, 0.0)
    return out.astype(z.dtype, copy=False)


def _within(labels, z):
    """(whether a row's label is in a tile of logits, rows, a class of the tile for each: the label if it is there)."""
    classes = z.shape[1]
    return ((labels >= 0) & (labels < classes), xp.arange(len(labels), like=labels),
            xp.minimum(xp.maximum(labels, 0), classes - 1))


def rules(sums, slopes, kept=tuple):
    """(forward, pullback) of x (n, in), weight (classes, in) and integer labels (n,), by what a tile of logits z (n,
    width) gives: sums(z, labels) -> (largest, sums of exponentials), each (n,), in float32 where z has 16 bits;
    slopes(ct, z, labels, largest, sums) -> its cotangents, of z's shape and dtype. There labels count from the tile's
    first class, so that most lie outside. kept: the class of what backward gets.

    shares  None, or whose share of the classes `weight` has: shares.here(labels), counted from this rank's first class,
            -1 for others', and shares.together(m, s, z[label], here), of all classes, of those of this rank's
    """

    def numbered(labels, ignore, shares):
        counted, labels = counted_labels(labels, ignore)
        labels = labels.astype(xp.int64)
        return counted, labels if shares is None else shares.here(labels)

    def forward(x, weight, labels, ignore, wide, shares=None):
        counted, labels = numbered(labels, ignore, shares)
        most = None
        for first, end in _tiles(x, weight):
            z = matmul(x, weight[first:end].T)
            inside, rows, at = _within(labels - first, z)
            picked = _wide(z[rows, at])
            largest, share = sums(z, labels - first)
            if most is None:
                most, total, right = largest, share, picked
            else:
                larger = xp.maximum(most, largest)
                total = total * xp.exp(most - larger) + share * xp.exp(largest - larger)
                most, right = larger, choose(inside, picked, right)
        if shares is not None:
            most, total, right = shares.together(most, total, right, labels)
        losses = xp.log(total) + (most - right)
        losses = losses if counted is None else choose(counted, losses, 0.0)
        return losses if wide else losses.astype(z.dtype, copy=False), kept((most, total))

    def pullback(ct, wanted, x, weight, labels, ignore, shares, aux):
        counted, labels = numbered(labels, ignore, shares)
        ct = _wide(ct) if counted is None else choose(counted, _wide(ct), 0.0)
        gx = gw = None
        for first, end in _tiles(x, weight):
            part = weight[first:end]
            g = slopes(ct, matmul(x, part.T), labels - first, *aux)
            if wanted[0]:
                share = _wide(matmul(g, part))
                gx = share if gx is None else xp.add(gx, share, out=gx)
            if wanted[1]:
                if gw is None:
                    gw = getattr(wanted[1], "array", None)      # where `wanted` is an Into of the engine's
                    gw = gw if gw is not None and gw.dtype == g.dtype else xp.empty(weight.shape, g.dtype, like=g)
                matmul(g.T, x, out=gw[first:end])
        return gx if gx is None else gx.astype(x.dtype, copy=False), gw

    return forward, pullback
