# 19.4: where an integer was asked for
import numpy as np


def positions(time, rank, size):
    if time % (2 * size):
        raise ValueError(f"{time} positions can't be cut into {2 * size} equal parts, two for each of {size} ranks")
    part = time / (2 * size)
    return np.concatenate([np.arange(part) + number * part for number in (rank, 2 * size - 1 - rank)])


def products(q_at, k_at):
    queries, keys = (np.split(at, 2) for at in (q_at, k_at))
    return [(i, j) for i in range(2) for j in range(2) if queries[i][-1] >= keys[j][0]]


# ours
def half(i, n):
    return slice(i * n // 2, (i + 1) * n // 2)


def by_halves(q, k, v, q_at, k_at, before, attention):
    if before is None:
        before = np.zeros((*q.shape[:2], v.shape[2])), np.full(q.shape[:2], -np.inf)
    out, lse = (x.copy() for x in before)
    for i, j in products(q_at, k_at):
        rows, keys = half(i, len(q_at)), half(j, len(k_at))
        out[:, rows], lse[:, rows] = attention(q[:, rows], k[:, keys], v[:, keys], q_at[rows], k_at[keys],
                                               (out[:, rows], lse[:, rows]))
    return out, lse


def backward_by_halves(q, k, v, q_at, k_at, out, lse, dout, attention_backward):
    grads = [np.zeros_like(x) for x in (q, k, v)]
    for i, j in products(q_at, k_at):
        rows, keys = half(i, len(q_at)), half(j, len(k_at))
        parts = attention_backward(q[:, rows], k[:, keys], v[:, keys], q_at[rows], k_at[keys], out[:, rows],
                                   lse[:, rows], dout[:, rows])
        for grad, place, part in zip(grads, (rows, keys, keys), parts, strict=True):
            grad[:, place] += part
    return tuple(grads)
