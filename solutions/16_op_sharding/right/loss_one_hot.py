# 16.4: one-hot labels, the last two sums in one message
import numpy as np


def cross_entropy(comm, logits, labels, classes):
    rows, own = logits.shape
    first = classes * comm.rank // comm.size
    one_hot = (np.asarray(labels)[:, None] == first + np.arange(own)[None, :]).astype(float)
    top = np.max(logits, axis=1)
    comm.all_reduce(top, "max")
    shifted = logits - top[:, None]
    both = np.stack([np.exp(shifted).sum(axis=1), np.einsum("ij,ij->i", shifted, one_hot)])
    comm.all_reduce(both)
    total, at_label = both
    loss = (np.log(total) - at_label).sum() / rows
    return loss, (np.exp(shifted) / total[:, None] - one_hot) / rows
