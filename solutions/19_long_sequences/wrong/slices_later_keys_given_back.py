# 19.6: Are later keys multiplied as well, and hidden?
import numpy as np


class SlicedAttention:
    def __init__(self):
        self.slices = {}

    def forward(self, micro_batch, q, k, v):
        slices = self.slices.setdefault(micro_batch, [])
        slices.append({"q": q, "k": k, "v": v, "dk": np.zeros(k.shape), "dv": np.zeros(v.shape)})
        mine = self.seen(slices)
        keys, values = np.concatenate([one["k"] for one in mine], 1), np.concatenate([one["v"] for one in mine], 1)
        first = keys.shape[1] - q.shape[1]
        scores = q @ keys.transpose(0, 2, 1) / q.shape[2] ** 0.5
        scores = np.where(np.arange(keys.shape[1]) <= first + np.arange(q.shape[1])[:, None], scores, -np.inf)
        p = np.exp(scores - scores.max(2, keepdims=True))
        slices[-1]["p"] = p / p.sum(2, keepdims=True)
        return slices[-1]["p"] @ values

    def backward(self, micro_batch, dout):
        slices = self.slices[micro_batch]
        mine = self.seen(slices)
        at = max(n for n, one in enumerate(slices) if "p" in one)
        own = slices[at]
        keys, values = np.concatenate([one["k"] for one in mine], 1), np.concatenate([one["v"] for one in mine], 1)
        q, p = own["q"], own.pop("p")
        p = np.concatenate([p, np.zeros((*p.shape[:2], keys.shape[1] - p.shape[2]))], 2)
        dp = dout @ values.transpose(0, 2, 1)
        ds = p * (dp - (p * dp).sum(2, keepdims=True)) / q.shape[2] ** 0.5
        ends = np.cumsum([one["k"].shape[1] for one in mine])[:-1]
        for one, dk, dv in zip(mine, np.split(ds.transpose(0, 2, 1) @ q, ends, 1), np.split(p.transpose(0, 2, 1) @ dout, ends, 1)):
            one["dk"] += dk
            one["dv"] += dv
        if at == 0:
            del self.slices[micro_batch]
        return ds @ keys, own["dk"], own["dv"]

    def seen(self, slices):
        return slices
