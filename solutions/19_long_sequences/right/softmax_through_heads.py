# 19.1: head by head, and merge with log1p
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
    (a, la), (b, lb) = one, other
    top, low = np.maximum(la, lb), np.minimum(la, lb)
    nothing = np.isneginf(top)
    lse = np.where(nothing, -np.inf, top + np.log1p(np.exp(low - np.where(nothing, 0, top))))
    x, y = np.exp(la - np.where(nothing, 0, top)), np.exp(lb - np.where(nothing, 0, top))
    share = np.divide(x, x + y, out=np.zeros_like(x), where=~nothing)[..., None]
    return a * share + b * (1 - share), lse


def attention(q, k, v, q_at, k_at, before=None, block=64):
    for first in range(0, len(k_at), block):
        last = first + block
        piece = attend(q, k[:, first:last], v[:, first:last], q_at, k_at[first:last])
        before = piece if before is None else merge(before, piece)
    return before
