"""16.3 Attention by heads.

Heads don't know of each other until the output's matrix mixes them. So each rank has some of the heads: their columns
of the queries', keys' and values' matrix, and their rows of the output's. It is 16.2 with attention in place of tanh.
"""

import numpy as np


def attend(q, k, v):
    """Causal attention of some heads: (their outputs [heads, time, size], the weights [heads, time, time]).

    q, k, v  [heads, time, size]

    Position t sees the positions 0 … t. Scores are divided by √size, and may still be in the tens of thousands, of
    either sign. The weights of a position add up to 1.
    """
    # begin with the scores of all pairs of positions, [heads, time, time]; np.tri(time) says which ones may be seen
    time, size = q.shape[1:]
    scores = np.where(np.tri(time), q @ k.transpose(0, 2, 1) / np.sqrt(size), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights @ v, weights


def attend_backward(q, k, v, weights, dout):
    """The gradients by q, k and v. weights: as attend gave them; dout: the gradient by the heads' outputs."""
    by_weights = dout @ np.swapaxes(v, 1, 2)
    by_scores = weights * (by_weights - np.sum(weights * by_weights, axis=-1, keepdims=True)) / q.shape[-1] ** 0.5
    return by_scores @ k, np.swapaxes(by_scores, 1, 2) @ q, np.swapaxes(weights, 1, 2) @ dout


# ours
def summed(comm, x):
    total = x.copy()
    comm.all_reduce(total)
    return total


class ParallelAttention:
    """This rank's heads of a causal self-attention.

    params  {"qkv", "qkv_bias", "out", "out_bias"}: this rank's parts, matrices and vectors as the whole ones are, with
            the columns and rows of its heads in the same order
    """

    def __init__(self, comm, params, heads, cut):
        """Keep this rank's parts: of its heads, and the whole out_bias.

        comm    the Communicator: comm.rank, comm.size, comm.all_reduce(x), in place
        params  {"qkv": [dim, 3·heads·size], "qkv_bias": [3·heads·size], "out": [heads·size, dim], "out_bias": [dim]},
                whole, the same on all ranks; not to be changed. The columns of qkv: those of the queries, head after
                head, then those of the keys, head after head, then those of the values. dim and size are independent
        heads   how many; rank 0 has the first ones, in order. ValueError, with both numbers in its text, if the ranks
                can't have equally many
        cut     yours, of 16.1: cut(x, placement, size), for any number of axes
        """
        # begin with the columns of qkv: which ones belong to heads 0 and 1? As an array [dim, 3, heads, size] it has an
        # axis along which heads lie
        if heads % comm.size:
            raise ValueError(f"{heads} heads can't be shared equally by {comm.size} ranks")
        self.comm, self.heads, self.size = comm, heads // comm.size, len(params["out"]) // heads
        dim, inner = len(params["qkv"]), self.heads * self.size
        matrix = params["qkv"].reshape(dim, 3, heads, self.size)
        bias = params["qkv_bias"].reshape(3, heads, self.size)
        self.params = {"qkv": cut(matrix, "S2", comm.size)[comm.rank].reshape(dim, 3 * inner),
                       "qkv_bias": cut(bias, "S1", comm.size)[comm.rank].ravel(),
                       "out": cut(params["out"], "S0", comm.size)[comm.rank], "out_bias": params["out_bias"]}

    def forward(self, x):
        """(y [time, dim], whole and the same on all ranks; what backward will need of this pass).

        x  [time, dim], the same on all ranks
        """
        # begin with x times this rank's columns, as [time, 3, own heads, size]; attend wants the heads first
        joined = (x @ self.params["qkv"] + self.params["qkv_bias"]).reshape(len(x), 3, self.heads, self.size)
        q, k, v = joined.transpose(1, 2, 0, 3)
        found, weights = attend(q, k, v)
        o = found.transpose(1, 0, 2).reshape(len(x), self.heads * self.size)
        return summed(self.comm, o @ self.params["out"]) + self.params["out_bias"], (x, q, k, v, weights, o)

    def backward(self, kept, dy):
        """(the gradient by x, whole on all ranks; the gradients by this rank's params, under their names).

        kept  what forward gave beside y. Several forwards may be under way
        dy    [time, dim]: the gradient by y, the same on all ranks
        """
        # begin with the end, as in 16.2: out_bias, out, then attend_backward; what did g and f do in the backward pass?
        x, q, k, v, weights, o = kept
        do = (dy @ self.params["out"].T).reshape(len(x), self.heads, self.size).transpose(1, 0, 2)
        by_qkv = np.stack(attend_backward(q, k, v, weights, do)).transpose(2, 0, 1, 3)
        by_qkv = by_qkv.reshape(len(x), 3 * self.heads * self.size)
        grads = {"qkv": x.T @ by_qkv, "qkv_bias": by_qkv.sum(0), "out": o.T @ dy, "out_bias": dy.sum(0)}
        return summed(self.comm, by_qkv @ self.params["qkv"].T), grads
