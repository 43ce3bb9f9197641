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
    raise NotImplementedError("begin with exp(score - lse), which needs no greatest score and no sum. Keys that "
                              "aren't seen have weight 0; their scores may be far above lse")


def attention_backward(q, k, v, q_at, k_at, out, lse, dout, block=64):
    """What these keys add to the gradient by q, and the gradients by them and their values: (dq, dk, dv).

    k, v      [heads, keys, size] and [heads, keys, width]: of all keys, or some of them
    out, lse  [heads, queries, width] and [heads, queries]: attention to all keys
    dout      [heads, queries, width]: the gradient by out

    The arguments stay as they are. Keys are taken by `block` at a time (the last ones may be fewer), and beside
    arguments and results nothing is held that grows with their number.
    """
    raise NotImplementedError("begin with D, once, of all keys. Then a block: its weights, and what each of dq, dk "
                              "and dv gets from it")
