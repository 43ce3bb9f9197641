# 19.6: it fails with slices of several lengths, [1, 5, 2, 1]
import numpy as np


class SlicedAttention:
    def __init__(self):
        self.slices = {}

    def weights(self, q, slices):
        keys = np.concatenate([one["k"] for one in slices], 1)
        first = keys.shape[1] - q.shape[1]
        scores = q @ keys.swapaxes(1, 2) / np.sqrt(q.shape[2])
        scores[:, np.arange(keys.shape[1]) > first + np.arange(q.shape[1])[:, None]] = -np.inf
        p = np.exp(scores - scores.max(-1, keepdims=True))
        return p / p.sum(-1, keepdims=True), keys, np.concatenate([one["v"] for one in slices], 1)

    def forward(self, micro_batch, q, k, v):
        slices = self.slices.setdefault(micro_batch, [])
        slices.append({"q": q, "k": k, "v": v, "dk": np.zeros_like(k), "dv": np.zeros_like(v)})
        p, _, values = self.weights(q, slices)
        return p @ values

    def backward(self, micro_batch, dout):
        slices = self.slices[micro_batch]
        own = slices[-1]
        p, keys, values = self.weights(own["q"], slices)
        dp = dout @ values.swapaxes(1, 2)
        ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / np.sqrt(own["q"].shape[2])
        dkeys, dvalues = ds.swapaxes(1, 2) @ own["q"], p.swapaxes(1, 2) @ dout
        for one, dk, dv in zip(slices, np.array_split(dkeys, len(slices), 1), np.array_split(dvalues, len(slices), 1)):
            one["dk"] += dk
            one["dv"] += dv
        slices.pop()
        if not slices:
            del self.slices[micro_batch]
        return ds @ keys, own["dk"], own["dv"]
