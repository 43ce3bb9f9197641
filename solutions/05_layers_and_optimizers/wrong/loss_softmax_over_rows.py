# 05.2: the softmax runs over the wrong axis
import numpy as np


def softmax_cross_entropy(logits, labels):
    if len(labels) == 0:
        return 0.0, logits.copy()
    rows = np.arange(len(labels))
    shifted = logits - logits.max(axis=0)
    p = np.exp(shifted) / np.exp(shifted).sum(axis=0)
    loss = -np.log(p[rows, labels] + 1e-300).sum()
    p[rows, labels] -= 1
    return loss, p
