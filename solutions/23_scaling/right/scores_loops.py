# 23.5: head by head, in loops
import numpy as np


def clip_scores(comm, x, w_q, w_k, heads, threshold):
    size = len(w_q[0]) // heads
    group = heads * size // w_k.shape[1]
    best = np.full(heads, -np.inf)
    w_q, w_k = w_q.copy(), w_k.copy()
    for h in range(heads):
        at, key = slice(h * size, (h + 1) * size), slice(h // group * size, (h // group + 1) * size)
        for sample in x:
            q, k = sample @ w_q[:, at], sample @ w_k[:, key]
            for t in range(len(sample)):
                best[h] = max(best[h], *(float(q[t] @ k[s]) / np.sqrt(size) for s in range(t + 1)))
    comm.all_reduce(best, "max")
    for h in range(heads):
        if best[h] > threshold and best[h] != np.inf:
            at, gamma = slice(h * size, (h + 1) * size), threshold / best[h]
            if group == 1:
                w_q[:, at] *= np.sqrt(gamma)
                w_k[:, at] *= np.sqrt(gamma)
            else:
                w_q[:, at] *= gamma
    return w_q, w_k, best
