# 19.1: the new lse is the greater of the two, and the means are weighed by that
import numpy as np


def attend(q, k, v, q_at, k_at):
    scores = np.where(k_at <= q_at[:, None], q @ k.transpose(0, 2, 1) / q.shape[-1] ** 0.5, -np.inf)
    greatest = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(greatest == -np.inf, 0, greatest))
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide='ignore'):
        return (weights @ v / np.where(total == 0, 1, total), (greatest + np.log(total))[..., 0])

def merge(one, other):
    lse = np.maximum(one[1], other[1])
    unit = np.where(lse == -np.inf, 0, lse)
    return (sum((out * np.exp(own - unit)[..., None] for out, own in (one, other))), lse)

def attention(q, k, v, q_at, k_at, before=None, block=64):
    for first in range(0, len(k_at), block):
        keys = slice(first, first + block)
        piece = attend(q, k[:, keys], v[:, keys], q_at, k_at[keys])
        before = piece if before is None else merge(before, piece)
    return before
