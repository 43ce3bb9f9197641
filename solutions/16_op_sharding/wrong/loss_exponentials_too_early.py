# 16.4: first the maximum of all ranks, then the exponentials
import numpy as np


def cross_entropy(comm, logits, labels, classes):
    first, (rows, own) = classes * comm.rank // comm.size, logits.shape
    top = logits.max(1)
    exps = np.exp(logits - top[:, None])
    comm.all_reduce(top, op="max")
    mine = np.flatnonzero((labels >= first) & (labels < first + own))
    numbers = np.zeros((2, rows))
    numbers[0] = exps.sum(1)
    numbers[1, mine] = logits[mine, labels[mine] - first]
    comm.all_reduce(numbers)
    grad = exps / numbers[0][:, None]
    grad[mine, labels[mine] - first] -= 1
    return float(np.mean(np.log(numbers[0]) + top - numbers[1])), grad / rows
