"""19.2 The gradient, with the weights made again.

Forward has thrown the weights away, [heads, queries, keys] of them. Backward makes them again, a block of keys at a
time: lse is all that it takes. With p the weights, o = p v and ō the gradient by o:

    v̄ = pᵀ ō        D = Σ ō·o        s̄ = p (ō vᵀ - D)        q̄ = s̄ k / √size        k̄ = s̄ᵀ q / √size

D is a number per query. In the gradient of a softmax stands Σ p p̄, over all keys, with p̄ = ō vᵀ; but that is ō·Σ p v,
and Σ p v is o, which is there.
"""

import numpy as np


def weights(q, k, q_at, k_at, lse):
    """The softmax's weights of these keys among all keys, made again: [heads, queries, keys].

    q, k        [heads, queries, size] and [heads, keys, size]
    q_at, k_at  integers [queries] and [keys]: positions; a query sees keys at its own and before
    lse         [heads, queries]: of all keys, of which these may be some; -inf where a query sees none at all
    """
    # begin with exp(score - lse), which needs no greatest score and no sum. Keys that aren't seen have weight 0; their
    # scores may be far above lse
    scores = q @ k.transpose(0, 2, 1) / q.shape[-1] ** 0.5
    return np.exp(np.where(k_at <= q_at[:, None], scores - lse[..., None], -np.inf))


def attention_backward(q, k, v, q_at, k_at, out, lse, dout, block=64):
    """What these keys add to the gradient by q, and the gradients by them and their values: (dq, dk, dv).

    k, v      [heads, keys, size] and [heads, keys, width]: of all keys, or some of them
    out, lse  [heads, queries, width] and [heads, queries]: attention to all keys
    dout      [heads, queries, width]: the gradient by out

    The arguments stay as they are. Keys are taken by `block` at a time (the last ones may be fewer), and beside
    arguments and results nothing is held that grows with their number.
    """
    # begin with D, once, of all keys. Then a block: its weights, and what each of dq, dk and dv gets from it
    root = q.shape[-1] ** 0.5
    D = (dout * out).sum(-1, keepdims=True)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for first in range(0, len(k_at), block):
        keys = slice(first, first + block)
        p = weights(q, k[:, keys], q_at, k_at[keys], lse)
        by_scores = p * (dout @ v[:, keys].transpose(0, 2, 1) - D) / root
        dq += by_scores @ k[:, keys]
        dk[:, keys] = by_scores.transpose(0, 2, 1) @ q
        dv[:, keys] = p.transpose(0, 2, 1) @ dout
    return dq, dk, dv
