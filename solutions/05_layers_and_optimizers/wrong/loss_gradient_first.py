# 05.2: loss and gradient are returned in the wrong order
import numpy as np


def softmax_cross_entropy(logits, labels):
    rows = np.arange(len(labels))
    shifted = logits - logits.max(axis=1, keepdims=True)
    exps = np.exp(shifted)
    sums = exps.sum(axis=1, keepdims=True)
    losses = np.log(sums[:, 0]) - shifted[rows, labels]
    gradient = exps / sums
    gradient[rows, labels] -= 1
    return gradient, losses.sum()
