# 19.6: a slice sees its own keys alone
import numpy as np


class SlicedAttention:
    def __init__(self):
        self.places = {}

    def forward(self, micro_batch, q, k, v):
        slices, keys, values = self.places.get(micro_batch, ([], k[:, :0], v[:, :0]))
        at = np.arange(k.shape[1])
        scores = q @ k.transpose(0, 2, 1) / q.shape[2] ** 0.5
        scores = np.where(at <= at[-q.shape[1]:, None], scores, -np.inf)
        p = np.exp(scores - scores.max(2, keepdims=True))
        p /= p.sum(2, keepdims=True)
        self.places[micro_batch] = [*slices, (q, p, k, v)], keys, values
        return p @ v

    def backward(self, micro_batch, dout):
        slices, keys, values, *said = self.places.pop(micro_batch)
        q, p, keys, values = slices.pop()
        by_p = dout @ values.transpose(0, 2, 1)
        by_scores = p * (by_p - (p * by_p).sum(2, keepdims=True)) / q.shape[2] ** 0.5
        dkeys, dvalues = by_scores.transpose(0, 2, 1) @ q, p.transpose(0, 2, 1) @ dout
        if slices:
            self.places[micro_batch] = slices, keys, values
        return by_scores @ keys, dkeys, dvalues
