# 16.4: the loss isn't a finite number
import numpy as np


def cross_entropy(comm, logits, labels, classes):
    rows, own = logits.shape
    first = classes * comm.rank // comm.size
    m = logits.max(1)
    comm.all_reduce(m, "max")
    e = np.exp(logits - m[:, None])
    here = (labels >= first) & (labels < first + own)
    at = np.where(here, labels - first, 0)
    two = np.stack([e.sum(1), np.where(here, logits[np.arange(rows), at], 0.0)])
    comm.all_reduce(two, "sum")
    loss = -np.mean(np.log(np.exp(two[1] - m) / two[0]))
    grad = e / two[0][:, None]
    grad[np.flatnonzero(here), at[here]] -= 1
    return float(loss), grad / rows
