# 23.5: the least of what is negated, and one row of keys at a time
import numpy as np


def clip_scores(comm, x, w_q, w_k, heads, threshold):
    size, dtypes = w_q.shape[1] // heads, (w_q.dtype, w_k.dtype)
    q = np.stack(np.split(x @ w_q, heads, axis=-1))
    k = np.stack(np.split(x @ w_k, w_k.shape[1] // size, axis=-1))
    k = np.repeat(k, heads // len(k), axis=0)
    least = np.full(heads, np.inf)
    for s in range(x.shape[1]):
        scores = -(q[:, :, s:] * k[:, :, s:s + 1]).sum(-1).reshape(heads, -1) / np.sqrt(size)
        least = np.minimum(least, scores.min(1, initial=np.inf))
    comm.all_reduce(least, "min")
    scores = -least
    gamma = np.ones(heads)
    for head, score in enumerate(scores):
        if np.isfinite(score):
            gamma[head] = min(1.0, threshold / score) if score > 0 else 1.0
    own = w_k.shape == w_q.shape
    left = np.repeat(np.sqrt(gamma) if own else gamma, size)
    right = np.repeat(np.sqrt(gamma), size) if own else 1.0
    return (w_q * left).astype(dtypes[0]), (w_k * right).astype(dtypes[1]), scores
