# 05.2: log of 0: the softmax of the right class rounds to 0
import numpy as np


def softmax_cross_entropy(logits, labels):
    rows = np.arange(len(labels))
    shifted = logits - logits.max(axis=1, keepdims=True)
    exps = np.exp(shifted)
    sums = exps.sum(axis=1, keepdims=True)
    p = exps / sums
    loss = -np.log(p[rows, labels]).sum()
    p[rows, labels] -= 1
    return loss, p
