# 19.5: a query after the other
import numpy as np


def mean_keys(k, size):
    heads, keys, features = k.shape
    blocks = keys // size
    return k[:, :blocks * size].reshape(heads, blocks, size, features).mean(2)


def choose(q, means, size, count):
    heads, queries, _ = q.shape
    chosen = np.zeros((heads, queries, -(-queries // size)), bool)
    for head in range(heads):
        for at in range(queries):
            own = at // size
            scores = means[head, :own] @ q[head, at]
            chosen[head, at, own] = True
            for _ in range(min(count - 1, own)):
                best = scores.argmax()
                chosen[head, at, best], scores[best] = True, -np.inf
    return chosen


def block_attention(q, k, v, size, count, attention):
    chosen = choose(q, mean_keys(k, size), size, count)
    out, lse, at = np.zeros((*q.shape[:2], v.shape[2])), np.full(q.shape[:2], -np.inf), np.arange(q.shape[1])
    for head, block in np.ndindex(len(q), chosen.shape[2]):
        one, keys = slice(head, head + 1), slice(block * size, (block + 1) * size)
        rows = np.flatnonzero(chosen[head, :, block])
        out[one, rows], lse[one, rows] = attention(q[one, rows], k[one, keys], v[one, keys], rows, at[keys],
                                                   (out[one, rows], lse[one, rows]))
    return out
