# 05.2: exp overflows: exp(710) is inf
import numpy as np


def softmax_cross_entropy(logits, labels):
    rows = np.arange(len(labels))
    exps = np.exp(logits)
    gradient = exps / exps.sum(axis=1, keepdims=True)
    loss = -np.log(gradient[rows, labels]).sum()
    gradient[rows, labels] -= 1
    return loss, gradient
