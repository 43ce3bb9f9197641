# 05.2: the argument logits isn't what it was before the call
import numpy as np


def softmax_cross_entropy(logits, labels):
    logits -= logits.max(axis=1, keepdims=True)
    rows = np.arange(len(labels))
    exps = np.exp(logits)
    sums = exps.sum(axis=1, keepdims=True)
    gradient = exps / sums
    gradient[rows, labels] -= 1
    return (np.log(sums[:, 0]) - logits[rows, labels]).sum(), gradient
