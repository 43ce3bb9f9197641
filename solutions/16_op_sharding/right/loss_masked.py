# 16.4: another rank's label is looked up at place 0, and what was found there is masked
import numpy as np


def cross_entropy(comm, logits, labels, classes):
    rows, own = logits.shape
    top = np.max(logits, axis=1)
    comm.all_reduce(top, op="max")
    z = logits - top[:, None]

    local = labels - classes * comm.rank // comm.size
    elsewhere = (local < 0) | (local >= own)
    local[elsewhere] = 0
    picked = z[np.arange(rows), local]
    picked[elsewhere] = 0.0
    comm.all_reduce(picked, op="sum")

    softmax = np.exp(z)
    total = softmax.sum(axis=1)
    comm.all_reduce(total, op="sum")
    loss = (np.log(total) - picked).mean()

    softmax /= total[:, None]
    softmax[np.arange(rows), local] -= ~elsewhere
    return loss, softmax / rows
