"""16.4 A loss without the logits.

The last layer of a language model makes a score for each of, say, 128,000 classes, at every position: nothing in the
model is larger. Cut by columns, every rank has the scores of some classes, and they stay where they are: what travels
is a few numbers per position.
"""

import numpy as np


def cross_entropy(comm, logits, labels, classes):
    """(the mean of -log softmax(logits)[label] over all rows, on all ranks; its gradient by this rank's logits).

    comm     the Communicator: comm.rank, comm.size, comm.all_reduce(x, op), in place, op "sum" or "max"
    logits   [rows, own]: this rank's columns; rank r of N has those of the classes from classes·r//N up to
             classes·(r+1)//N. Not to be changed. They may be in the thousands
    labels   [rows] integers below `classes`, the same on all ranks
    classes  how many there are on all ranks, at least N: every rank has one

    A rank may send three numbers per row.
    """
    # begin with one rank: the loss of a row is log Σ exp(z - m) + m - z[label], with the greatest logit as m. Which of
    # these does a rank know of its own columns only, and what makes it the number of all columns?
    first, last = classes * comm.rank // comm.size, classes * (comm.rank + 1) // comm.size
    greatest = logits.max(1)
    comm.all_reduce(greatest, "max")
    exps = np.exp(logits - greatest[:, None])
    total = exps.sum(1)
    comm.all_reduce(total)
    rows = np.flatnonzero((labels >= first) & (labels < last))
    own = labels[rows] - first
    picked = np.zeros(len(labels))
    picked[rows] = logits[rows, own]
    comm.all_reduce(picked)
    grad = exps / total[:, None]
    grad[rows, own] -= 1
    return np.mean(np.log(total) + greatest - picked), grad / len(labels)
