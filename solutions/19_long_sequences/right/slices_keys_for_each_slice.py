# 19.6: each slice keeps the keys and values that it saw, and sums go from slice to slice
from collections import defaultdict

import numpy as np


class SlicedAttention:
    def __init__(self):
        self.stacks = defaultdict(list)
        self.said = {}

    def forward(self, micro_batch, q, k, v):
        stack = self.stacks[micro_batch]
        if stack:
            _, before_k, before_v, _ = stack[-1]
            k, v = np.concatenate((before_k, k), axis=1), np.concatenate((before_v, v), axis=1)
        n, m = q.shape[1], k.shape[1]
        s = np.einsum("hqf,hkf->hqk", q, k) / np.sqrt(q.shape[-1])
        s[:, ~np.tri(n, m, m - n, dtype=bool)] = -np.inf
        s = np.exp(s - s.max(-1, keepdims=True))
        s /= s.sum(-1, keepdims=True)
        stack.append((q, k, v, s))
        return np.einsum("hqk,hkw->hqw", s, v)

    def backward(self, micro_batch, dout):
        q, k, v, p = self.stacks[micro_batch].pop()
        before = k.shape[1] - q.shape[1]
        dp = np.einsum("hqw,hkw->hqk", dout, v)
        ds = p * (dp - np.einsum("hqk,hqk->hq", p, dp)[..., None]) / np.sqrt(q.shape[-1])
        dk, dv = np.einsum("hqk,hqf->hkf", ds, q), np.einsum("hqk,hqw->hkw", p, dout)
        if micro_batch in self.said:
            said = self.said.pop(micro_batch)
            dk, dv = dk + said[0], dv + said[1]
        if self.stacks[micro_batch]:
            self.said[micro_batch] = dk[:, :before], dv[:, :before]
        else:
            del self.stacks[micro_batch]
        return np.einsum("hqk,hkf->hqf", ds, k), np.array(dk[:, before:]), np.array(dv[:, before:])
