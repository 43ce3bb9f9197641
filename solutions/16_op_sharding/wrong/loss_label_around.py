# 16.4: are read around the corner
import numpy as np


def cross_entropy(comm, logits, labels, classes):
    first = classes * comm.rank // comm.size
    greatest = logits.max(1)
    comm.all_reduce(greatest, "max")
    exps = np.exp(logits - greatest[:, None])
    total = exps.sum(1)
    comm.all_reduce(total)
    rows = np.arange(len(labels))
    own = (labels - first) % logits.shape[1]
    picked = np.zeros(len(labels))
    picked[rows] = logits[rows, own]
    comm.all_reduce(picked)
    grad = exps / total[:, None]
    grad[rows, own] -= 1
    return np.mean(np.log(total) + greatest - picked), grad / len(labels)
