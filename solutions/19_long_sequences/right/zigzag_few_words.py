# 19.4: an error that says no more than two numbers; results by queries' halves
import numpy as np


def positions(time, rank, size):
    part, rest = divmod(time, 2 * size)
    if rest:
        raise ValueError(f"{time} positions, {size} ranks")
    late = 2 * size - 1 - rank
    return np.r_[rank * part:(rank + 1) * part, late * part:(late + 1) * part]


def halves(n):
    return slice(0, n // 2), slice(n // 2, n)


def products(q_at, k_at):
    return [[i, j] for j, keys in enumerate(halves(len(k_at))) for i, rows in enumerate(halves(len(q_at)))
            if max(q_at[rows]) >= min(k_at[keys])]


def by_halves(q, k, v, q_at, k_at, before, attention):
    rows, keys = halves(len(q_at)), halves(len(k_at))
    state = [None if before is None else (before[0][:, own], before[1][:, own]) for own in rows]
    for i, j in products(q_at, k_at):
        state[i] = attention(q[:, rows[i]], k[:, keys[j]], v[:, keys[j]], q_at[rows[i]], k_at[keys[j]], state[i])
    for i in range(2):
        if state[i] is None:
            shape = q[:, rows[i]].shape[:2]
            state[i] = np.zeros((*shape, v.shape[2])), np.full(shape, -np.inf)
    return tuple(np.concatenate(both, axis=1) for both in zip(*state, strict=True))


def backward_by_halves(q, k, v, q_at, k_at, out, lse, dout, attention_backward):
    rows, keys = halves(len(q_at)), halves(len(k_at))
    total = [np.zeros(x.shape) for x in (q, k, v)]
    for i, j in products(q_at, k_at):
        new = attention_backward(q[:, rows[i]], k[:, keys[j]], v[:, keys[j]], q_at[rows[i]], k_at[keys[j]],
                                 out[:, rows[i]], lse[:, rows[i]], dout[:, rows[i]])
        for grad, place, part in zip(total, (rows[i], keys[j], keys[j]), new, strict=True):
            grad[:, place] += part
    return total
