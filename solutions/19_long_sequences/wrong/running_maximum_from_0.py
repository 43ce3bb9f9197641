# 19.1: the greatest score so far begins at 0
import numpy as np


def attend(q, k, v, q_at, k_at):
    scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])
    scores = np.where(k_at <= q_at[:, None], scores, -np.inf)
    greatest = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isinf(greatest), 0, greatest))
    total = weights.sum(-1, keepdims=True)
    out = weights @ v / np.maximum(total, 1e-300)
    return out, (greatest + np.log(total))[..., 0]


def merge(one, other):
    lse = np.logaddexp(one[1], other[1])
    unit = np.where(np.isinf(lse), 0, lse)
    return one[0] * np.exp(one[1] - unit)[..., None] + other[0] * np.exp(other[1] - unit)[..., None], lse


def attention(q, k, v, q_at, k_at, before=None, block=64):
    """With a running maximum, sum, and mean that isn't divided yet."""
    if before is None:
        top, total = np.full((*q.shape[:2], 1), 0.0), np.zeros((*q.shape[:2], 1))
        mean = np.zeros((*q.shape[:2], v.shape[2]))
    else:
        top = before[1][..., None]
        total = np.where(np.isinf(top), 0.0, 1.0)
        mean = before[0] * total
    for first in range(0, len(k_at), block):
        keys = slice(first, first + block)
        scores = q @ k[:, keys].swapaxes(1, 2) / np.sqrt(q.shape[-1])
        scores = np.where(k_at[keys] <= q_at[:, None], scores, -np.inf)
        new = np.maximum(top, scores.max(-1, keepdims=True))
        unit = np.where(np.isinf(new), 0, new)
        shrink, p = np.exp(top - unit), np.exp(scores - unit)
        total = total * shrink + p.sum(-1, keepdims=True)
        mean = mean * shrink + p @ v[:, keys]
        top = new
    return mean / np.where(total == 0, 1, total), (top + np.log(total))[..., 0]
