# 16.4: each rank's own logarithm of the sum, merged; the loss is summed, row by row
import numpy as np


def cross_entropy(comm, logits, labels, classes):
    lo, hi = (classes * r // comm.size for r in (comm.rank, comm.rank + 1))
    lse = np.logaddexp.reduce(logits, axis=1)
    most = lse.copy()
    comm.all_reduce(most, "max")
    total = np.exp(lse - most)
    comm.all_reduce(total)
    lse = most + np.log(total)
    losses = lse.copy() if comm.rank == 0 else np.zeros(len(labels))
    gradient = np.exp(logits - lse[:, None])
    for i, label in enumerate(labels):
        if lo <= label < hi:
            losses[i] -= logits[i, label - lo]
            gradient[i, label - lo] -= 1.0
    mean = np.array([losses.mean()])
    comm.all_reduce(mean, "sum")
    return float(mean[0]), gradient / len(labels)
