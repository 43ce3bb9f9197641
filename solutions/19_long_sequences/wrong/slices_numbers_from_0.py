# 19.6: it fails with slices of several lengths
import numpy as np


class SlicedAttention:
    def __init__(self):
        self.places = [None] * 4

    def forward(self, micro_batch, q, k, v):
        slices, keys, values = self.places[micro_batch] or ([], k[:, :0], v[:, :0])
        keys, values = np.concatenate([keys, k], 1), np.concatenate([values, v], 1)
        at = np.arange(keys.shape[1])
        scores = q @ keys.transpose(0, 2, 1) / q.shape[2] ** 0.5
        scores = np.where(at <= at[-q.shape[1]:, None], scores, -np.inf)
        p = np.exp(scores - scores.max(2, keepdims=True))
        p /= p.sum(2, keepdims=True)
        self.places[micro_batch] = [*slices, (q, p)], keys, values
        return p @ values

    def backward(self, micro_batch, dout):
        slices, keys, values, *said = self.places[micro_batch]
        self.places[micro_batch] = None
        q, p = slices.pop()
        by_p = dout @ values.transpose(0, 2, 1)
        by_scores = p * (by_p - (p * by_p).sum(2, keepdims=True)) / q.shape[2] ** 0.5
        dkeys, dvalues = by_scores.transpose(0, 2, 1) @ q, p.transpose(0, 2, 1) @ dout
        for found, more in zip((dkeys, dvalues), said, strict=False):
            found += more
        first = keys.shape[1] - q.shape[1]
        if slices:
            self.places[micro_batch] = slices, *(x[:, :first].copy() for x in (keys, values, dkeys, dvalues))
        return by_scores @ keys, dkeys[:, first:].copy(), dvalues[:, first:].copy()
