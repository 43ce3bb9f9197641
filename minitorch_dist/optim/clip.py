"""Gradient clipping by global norm."""

from ..autodiff.writes import wrote
from ..backend import to, xp
from ..flat import BLOCK, flat_buffers


def block_sums(grads):
    """Σ g² per 4,096-element block of flat gradients, as float64 (blocks,): equal in any sharding."""
    blocks = grads.reshape(-1, BLOCK)
    return xp.multiply(blocks, blocks, dtype=xp.float64).sum(axis=1)


def tree_sum(values):
    """Sum along a balanced binary tree in index order: the same bits, whoever holds which part."""
    values = list(values)
    while len(values) > 1:
        values = [a + b for a, b in zip(values[::2], values[1::2], strict=False)] + values[len(values) & ~1:]
    return values[0] if values else 0.0


def clip_grad_norm_(params, max_norm):
    """Scale all gradients so that their common 2-norm is at most max_norm. Returns the norm before, a float.

    Gradients must be complete (after backward, all-reduced); parameters without one, and frozen ones, count as zero.
    Raises ValueError for a norm that is not finite, and changes nothing then.
    """
    if not max_norm >= 0:
        raise ValueError(f"clip_grad_norm_: max_norm is {max_norm}; it must be at least 0")
    params = [p for p in params if p.requires_grad]
    chosen = {id(p) for p in params}
    parts = []      # per flat buffer: the segments to clip, and the gradients with zeros for all others
    for flat in flat_buffers(params):
        flat.collect(fill_missing=False)
        segments = [s for s in flat.segments if id(s.tensor) in chosen]
        grads = flat.grads
        if len(segments) < len(flat.segments):
            grads = xp.zeros_like(flat.grads)
            for s in segments:
                grads[s.start:s.stop] = flat.grads[s.start:s.stop]
        parts.append((flat, segments, grads))
    norm = float(xp.sqrt(tree_sum(s for _, _, grads in parts for s in to(block_sums(grads), "cpu"))))
    if not xp.isfinite(norm):
        raise ValueError(f"clip_grad_norm_: the norm of the gradients is {norm}: some gradient is inf or NaN")
    if norm > max_norm:
        for flat, segments, _ in parts:
            for s in segments:
                flat.grads[s.start:s.stop] *= max_norm / (norm + 1e-6)      # torch's epsilon
            wrote(flat.grads, "clip_grad_norm_")
    return norm
