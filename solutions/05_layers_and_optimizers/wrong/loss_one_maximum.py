# 05.2: one number is subtracted from all rows
import numpy as np


def softmax_cross_entropy(logits, labels):
    rows = np.arange(len(labels))
    shifted = logits - logits.max(initial=-1e30)
    sums = np.exp(shifted).sum(axis=1, keepdims=True)
    gradient = np.exp(shifted) / sums
    gradient[rows, labels] -= 1
    return (np.log(sums[:, 0]) - shifted[rows, labels]).sum(), gradient
