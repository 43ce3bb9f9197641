"""05.2 Softmax cross-entropy that can't overflow."""

import numpy as np


def softmax_cross_entropy(logits, labels):
    """How surprised the model is by the labels, and the derivative of that.

    logits  array (n, classes), float32 or float64, of any finite size; n may be 0
    labels  int array (n,): the right class of each row

    Returns (loss, gradient): the sum over the rows of −log softmax(row)[label], and its gradient by the logits, an
    array (n, classes) of their dtype. A sum and not a mean: who calls it divides by the number of samples it wants.
    """
    # begin with the largest logit of each row: softmax(row) = softmax(row − anything), so subtract that one
    rows = np.arange(len(labels))
    shifted = logits - logits.max(axis=1, keepdims=True)
    exps = np.exp(shifted)
    sums = exps.sum(axis=1, keepdims=True)
    losses = np.log(sums[:, 0]) - shifted[rows, labels]
    gradient = exps / sums
    gradient[rows, labels] -= 1
    return losses.sum(), gradient
