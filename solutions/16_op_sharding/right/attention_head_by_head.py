# 16.3: head by head, columns picked by their numbers, a large negative number for -inf
import numpy as np


def attend(q, k, v):
    outputs, all_weights = [], []
    for qh, kh, vh in zip(q, k, v, strict=True):
        scores = np.einsum("ts,us->tu", qh, kh) / np.sqrt(qh.shape[1])
        scores[np.triu_indices(len(scores), 1)] = -1e30
        e = np.exp(scores - scores.max(axis=1)[:, None])
        all_weights.append(e / e.sum(axis=1)[:, None])
        outputs.append(all_weights[-1] @ vh)
    return np.array(outputs), np.array(all_weights)


def attend_backward(q, k, v, weights, dout):
    by_weights = dout @ np.swapaxes(v, 1, 2)
    by_scores = weights * (by_weights - np.sum(weights * by_weights, axis=-1, keepdims=True)) / q.shape[-1] ** 0.5
    return by_scores @ k, np.swapaxes(by_scores, 1, 2) @ q, np.swapaxes(weights, 1, 2) @ dout


class ParallelAttention:
    def __init__(self, comm, params, heads, cut):
        own, rest = divmod(heads, comm.size)
        if rest:
            raise ValueError(f"{comm.size} ranks, {heads} heads")
        width = params["out"].shape[0]
        self.comm, self.own, self.each = comm, own, width // heads
        rows = slice(comm.rank * own * self.each, (comm.rank + 1) * own * self.each)
        columns = np.concatenate([np.arange(width)[rows] + i * width for i in range(3)])
        self.params = {"qkv": params["qkv"][:, columns], "qkv_bias": params["qkv_bias"][columns],
                       "out": params["out"][rows], "out_bias": params["out_bias"].copy()}

    def split(self, x):
        return np.moveaxis(x.reshape(len(x), self.own, self.each), 1, 0)

    def forward(self, x):
        q, k, v = map(self.split, np.split(x @ self.params["qkv"] + self.params["qkv_bias"], 3, axis=1))
        out, weights = attend(q, k, v)
        joined = np.concatenate(list(out), axis=1)
        y = joined @ self.params["out"]
        self.comm.all_reduce(y)
        y += self.params["out_bias"]
        return y, {"x": x, "q": q, "k": k, "v": v, "weights": weights, "joined": joined}

    def backward(self, kept, dy):
        grads = {"out_bias": dy.sum(axis=0), "out": kept["joined"].T @ dy}
        dq, dk, dv = attend_backward(*(kept[name] for name in ("q", "k", "v", "weights")),
                                     self.split(dy @ self.params["out"].T))
        columns = np.concatenate([np.concatenate(list(d), axis=1) for d in (dq, dk, dv)], axis=1)
        grads |= {"qkv": kept["x"].T @ columns, "qkv_bias": columns.sum(axis=0)}
        dx = columns @ self.params["qkv"].T
        self.comm.all_reduce(dx)
        return dx, grads
