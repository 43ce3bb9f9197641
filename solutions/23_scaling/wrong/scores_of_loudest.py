# 23.5: one factor for all heads above the threshold
import numpy as np


def clip_scores(comm, x, w_q, w_k, heads, threshold):
    size = w_q.shape[1] // heads
    kv_heads = w_k.shape[1] // size
    q = (x @ w_q).reshape(*x.shape[:2], heads, size)
    k = (x @ w_k).reshape(*x.shape[:2], kv_heads, size).repeat(heads // kv_heads, axis=2)
    scores = np.einsum("bthd,bshd->bhts", q, k) / size ** 0.5
    seen = np.where(np.tri(x.shape[1], dtype=bool), scores, -np.inf)
    greatest = seen.max(axis=(0, 2, 3), initial=-np.inf).astype(np.float64)
    comm.all_reduce(greatest, "max")
    factor = np.ones(heads)
    above = np.isfinite(greatest) & (greatest > threshold)
    factor[above] = threshold / greatest.max(where=np.isfinite(greatest), initial=threshold)
    if kv_heads == heads:
        of_queries = of_keys = factor ** 0.5
    else:
        of_queries, of_keys = factor, np.ones(kv_heads)
    return ((w_q * of_queries.repeat(size)).astype(w_q.dtype), (w_k * of_keys.repeat(size)).astype(w_k.dtype),
            greatest)
