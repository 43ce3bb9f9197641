# 05.2: the right class's logit isn't shifted
import numpy as np


def softmax_cross_entropy(logits, labels):
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    sums = powers.sum(axis=1)
    rows = np.arange(len(labels))
    loss = (np.log(sums) - logits[rows, labels]).sum()
    gradient = powers / sums[:, None]
    gradient[rows, labels] -= 1
    return loss, gradient
