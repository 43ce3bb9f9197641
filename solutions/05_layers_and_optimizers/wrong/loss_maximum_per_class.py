# 05.2: the maximum is taken over the wrong axis
import numpy as np


def softmax_cross_entropy(logits, labels):
    if len(labels) == 0:
        return 0.0, logits.copy()
    rows = np.arange(len(labels))
    shifted = logits - logits.max(axis=0)
    sums = np.exp(shifted).sum(axis=1, keepdims=True)
    gradient = np.exp(shifted) / sums
    gradient[rows, labels] -= 1
    return (np.log(sums[:, 0]) - shifted[rows, labels]).sum(), gradient
