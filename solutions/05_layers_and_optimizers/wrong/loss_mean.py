# 05.2: the mean over the 9 rows instead of the sum
import numpy as np


def softmax_cross_entropy(logits, labels):
    rows = np.arange(len(labels))
    shifted = logits - logits.max(axis=1, keepdims=True)
    exps = np.exp(shifted)
    sums = exps.sum(axis=1, keepdims=True)
    p = exps / sums
    losses = np.log(sums[:, 0]) - shifted[rows, labels]
    p[rows, labels] -= 1
    return losses.sum() / max(len(rows), 1), p / max(len(rows), 1)
