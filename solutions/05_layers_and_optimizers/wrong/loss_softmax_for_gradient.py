# 05.2: the gradient is the softmax alone
import numpy as np


def softmax_cross_entropy(logits, labels):
    rows = np.arange(len(labels))
    shifted = logits - logits.max(axis=1, keepdims=True)
    exps = np.exp(shifted)
    sums = exps.sum(axis=1, keepdims=True)
    p = exps / sums
    losses = np.log(sums[:, 0]) - shifted[rows, labels]
    return losses.sum(), p
