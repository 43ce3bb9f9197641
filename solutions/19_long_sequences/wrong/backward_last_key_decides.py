# 19.2: a block of keys is left out of which some are seen
import numpy as np


def weights(q, k, q_at, k_at, lse):
    scores = q @ k.transpose(0, 2, 1) / q.shape[-1] ** 0.5
    return np.exp(np.where(k_at <= q_at[:, None], scores - lse[..., None], -np.inf))


def attention_backward(q, k, v, q_at, k_at, out, lse, dout, block=64):
    root = q.shape[-1] ** 0.5
    D = (dout * out).sum(-1, keepdims=True)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for first in range(0, len(k_at), block):
        keys = slice(first, first + block)
        if k_at[keys][-1] > q_at.max():
            continue
        p = weights(q, k[:, keys], q_at, k_at[keys], lse)
        by_scores = p * (dout @ v[:, keys].transpose(0, 2, 1) - D) / root
        dq += by_scores @ k[:, keys]
        dk[:, keys] = by_scores.transpose(0, 2, 1) @ q
        dv[:, keys] = p.transpose(0, 2, 1) @ dout
    return dq, dk, dv
