# 16.4: the gradient is divided by the number of rows whose label is this rank's
import numpy as np


def cross_entropy(comm, logits, labels, classes):
    first, last = classes * comm.rank // comm.size, classes * (comm.rank + 1) // comm.size
    greatest = logits.max(1)
    comm.all_reduce(greatest, "max")
    exps = np.exp(logits - greatest[:, None])
    total = exps.sum(1)
    comm.all_reduce(total)
    rows = np.flatnonzero((labels >= first) & (labels < last))
    own = labels[rows] - first
    picked = np.zeros(len(labels))
    picked[rows] = logits[rows, own]
    comm.all_reduce(picked)
    grad = exps / total[:, None]
    grad[rows, own] -= 1
    return np.mean(np.log(total) + greatest - picked), grad / len(rows)
