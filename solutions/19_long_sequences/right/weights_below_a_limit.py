# 19.2: scores of keys that aren't seen are limited, not hidden
import numpy as np


def weights(q, k, q_at, k_at, lse):
    s = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
    seen = k_at[None, :] <= q_at[:, None]
    safe = np.where(np.isneginf(lse), 0.0, lse)
    return np.exp(np.minimum(s - safe[..., None], 50)) * (seen & ~np.isneginf(lse)[..., None])


def attention_backward(q, k, v, q_at, k_at, out, lse, dout, block=64):
    D = (dout * out).sum(-1, keepdims=True)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    root = np.sqrt(q.shape[-1])
    for begin in range(0, k.shape[1], block):
        here = slice(begin, begin + block)
        p = weights(q, k[:, here], q_at, k_at[here], lse)
        dv[:, here] = p.transpose(0, 2, 1) @ dout
        ds = p * (dout @ v[:, here].transpose(0, 2, 1) - D) / root
        dq += ds @ k[:, here]
        dk[:, here] = ds.transpose(0, 2, 1) @ q
    return dq, dk, dv
