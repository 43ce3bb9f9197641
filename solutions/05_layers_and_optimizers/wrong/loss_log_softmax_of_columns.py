# 05.2: the softmax runs over the wrong axis
import numpy as np


def softmax_cross_entropy(logits, labels):
    if len(labels) == 0:
        return 0.0, logits.copy()
    rows = np.arange(len(labels))
    shifted = logits - logits.max(axis=0)
    exps = np.exp(shifted)
    sums = exps.sum(axis=0, keepdims=True)
    losses = np.log(sums[0, labels]) - shifted[rows, labels]
    gradient = exps / sums
    gradient[rows, labels] -= 1
    return losses.sum(), gradient
