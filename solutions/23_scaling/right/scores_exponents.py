# 23.5: factors by logarithms, of groups of heads
import numpy as np


def clip_scores(comm, x, w_q, w_k, heads, threshold):
    dim, size = w_q.shape[0], w_q.shape[1] // heads
    groups = w_k.shape[1] // size
    q = (x @ w_q).reshape(len(x), x.shape[1], groups, heads // groups, size)
    k = (x @ w_k).reshape(len(x), x.shape[1], groups, size)
    scores = np.einsum("btgjd,bsgd->gjbts", q, k).reshape(heads, len(x), x.shape[1], x.shape[1]) / np.sqrt(size)
    t, s = np.tril_indices(x.shape[1])
    seen = scores[:, :, t, s].reshape(heads, -1)
    mine = np.array([row.max() if row.size else -np.inf for row in seen], dtype=np.float64)
    comm.all_reduce(mine, op="max")
    clip = (mine > threshold) & (mine < np.inf)
    powers = np.zeros(heads)
    powers[clip] = np.log(threshold) - np.log(mine[clip])
    if groups == heads:
        powers /= 2
    new_q = w_q.reshape(dim, heads, size) * np.exp(powers)[:, None]
    new_k = w_k.reshape(dim, groups, size) * (np.exp(powers)[:, None] if groups == heads else 1.0)
    return (new_q.reshape(w_q.shape).astype(w_q.dtype), new_k.reshape(w_k.shape).astype(w_k.dtype), mine)
