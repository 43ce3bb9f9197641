"""Attention. Sequences are (batch, time, dim)."""

import math

from ..autodiff import ops
from ..autodiff.modes import is_recomputing, no_grad
from ..autodiff.ops.attention import greatest_scores
from ..autodiff.primitive import lower
from ..backend import assign, module_of, number, to_device_of, xp
from . import init
from .decoding import by_position
from .layers import Dropout, Linear
from .module import Module, Parameter, at_least_1
from .norm import RMSNorm
from .positions import Rotary, places, rotary_of


class MultiHeadAttention(Module):
    """Self-attention: (batch, time, dim) -> (batch, time, dim). With documents, integers (batch, time), each position
    looks at those of its own number, and rotary positions begin anew with each document. mask: attn_mask of
    ops.scaled_dot_product_attention, of which True takes part (torch's layer has it the other way round).

    heads       number of query heads, which divide dim
    kv_heads    number of key and value heads (default: heads); fewer are shared by groups of queries
    causal      no position sees a later one
    rotary      turn queries and keys by their positions: True, or a Rotary that says how
    bias        whether the two Linears have one
    window      None, or how many positions one sees at most: those less than so many away, itself among them
    qk_norm     divide each head's queries and keys by their root mean square, times a weight (size,) of all heads':
                scores can't grow with them
    dropout     probability to drop a weight in training, by an nn.Dropout of that name, where it isn't 0; see
                ops.scaled_dot_product_attention for what that costs
    sinks       whether each head has one, learned, 0 at first; the same there
    gated       multiply what each head has found by sigmoid(gate), a gate for each feature, which qkv makes of x
                besides: a head may answer nothing, and needs no position that all look at instead
    context     None, or who knows which positions x has, where it is a part of the sequence, and where the others' keys
                are: positions(time) and, called (q, k, v, causal, scale, documents, window, sinks= and dropped= if
                there are some, the latter where it `drops`, note= if scores are looked at, and it `watches`),
                attention; see parallel/context/context.py
    scale       what scores are multiplied by, besides what rotary may add; None: 1/√(dim/heads)
    Sources: Vaswani et al. 2017; Ainslie et al. 2023 (grouped queries); Jiang et al. 2023, "Mistral 7B" (windows);
    Henry et al. 2020, "Query-key normalization"; Qwen Team 2025, "Qwen3" (qk_norm as here); Qiu et al. 2025, "Gated
    attention for large language models", and Qwen Team 2025, "Qwen3-Next" (gated).
    """

    context = scale = window = rotary = None
    greatest = None     # (heads,) where somebody wants the greatest score of each in a step's forwards (qk_clip.py)
    q_norm = k_norm = dropout = sinks = None
    gated = False
    keeps = "keys"      # and values, in a KeyValueCache

    def __init__(self, dim, heads, kv_heads=None, causal=False, rotary=False, dtype=xp.float32, std=0.02, bias=True,
                 window=None, qk_norm=False, dropout=0.0, sinks=False, gated=False):
        super().__init__()
        dim, heads, kv_heads, self.window = at_least_1("MultiHeadAttention", dim=dim, heads=heads, kv_heads=kv_heads,
                                                       window=window)
        self._share(dim, heads, kv_heads)
        self.causal, self.rotary, self.gated = causal, rotary_of(rotary), gated
        if self.rotary is not None:
            self.rotary.frequencies(self.size)      # an odd size is refused now, and not by the first forward

        def weights(shape, dtype):
            return init.normal(shape, std, dtype)
        self.qkv = Linear(dim, sum(self.parts) * self.size, bias, dtype, weights)
        if qk_norm:
            self.q_norm, self.k_norm = (RMSNorm(self.size, dtype=dtype) for _ in range(2))
        self.out = Linear(dim, dim, bias, dtype, weights)
        if dropout:
            self.dropout = Dropout(dropout)
        if sinks:
            self.sinks = Sinks(heads, dtype)

    def _share(self, dim, heads, kv_heads):
        """How many heads there are, and of how many features. ValueError where they don't go up."""
        kv_heads = heads if kv_heads is None else kv_heads
        if dim % heads or heads % kv_heads:
            raise ValueError(f"{type(self).__name__}: {heads} heads must divide dim {dim}, {kv_heads} kv_heads the "
                             "heads")
        self.heads, self.kv_heads, self.size = heads, kv_heads, dim // heads

    @property
    def parts(self):
        """Heads of each part of what qkv makes: queries, keys, values, and gates, if there are some."""
        return (self.heads, self.kv_heads, self.kv_heads, *[self.heads] * bool(self.gated))

    def _check(self, x):
        if len(x.shape) != 3:
            raise ValueError(f"{type(self).__name__}: x {tuple(x.shape)} must be (batch, time, dim). Of packed rows "
                             "the documents are an argument of their own, Pipeline.run's packed=True")

    def _positions(self, time, documents):
        """Where so many positions stand in their sequence, or in their document; None: 0, 1, 2, …"""
        positions = None if self.context is None else self.context.positions(time)
        if documents is None:
            return positions
        return places(documents) if positions is None else places(documents)[:, positions]

    def _queries_keys_values(self, x, documents=None):
        """And gates, where there are some: (batch, heads, time, size) each."""
        self._check(x)
        h = self.qkv(x)     # may bring in positions that x hasn't (parallel/tensor/sequence_parallel.py)
        q, k, v, *gates = of_heads(h, self.size, *self.parts)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            positions = self._positions(q.shape[2], documents)
            q, k = self.rotary.turn(q, positions), self.rotary.turn(k, positions)
            if self.q_norm is None:     # which keeps them in any case
                v = v * 1.0     # for backward a view of h would keep queries and keys as well, as they were before
        return *self._of_one_dtype(q, k, v), *gates

    def _of_one_dtype(self, q, k, v):
        """All in v's dtype."""
        if q.dtype != v.dtype:      # autocast's norms are of float32, which would be sent and kept
            q, k = ops.astype(q, v.dtype), ops.astype(k, v.dtype)
        return q, k, v

    def _scale(self):
        """What scores are multiplied by, in all."""
        scale = 1 / math.sqrt(self.size) if self.scale is None else number(self.scale)
        return scale if self.rotary is None else scale * self.rotary.factor

    def _check_whole(self, what):
        if self.context is not None:
            raise ValueError(f"{what}: this rank has the keys of a part of the sequence only ({self.context}): load "
                             "the state_dict into a model that is not divided")

    def weights(self, x):
        """Where each position of x looks: (batch, heads, time, time), rows adding up to 1, with sinks to less; to
        be looked at."""
        self._check_whole("weights")
        with no_grad():
            q, k, *_ = self._queries_keys_values(x)
            return lower(ops.scaled_dot_product_attention(q, k, unit_values(x, k), is_causal=self.causal,
                                                          window=self.window, scale=self._scale(), **self._more()))

    @by_position
    def forward(self, x, documents=None, mask=None):
        if mask is not None:
            self._check_whole("a mask")
        dropped, watched = self._dropped(), self._watched()
        q, k, v, *gates = self._queries_keys_values(x, documents)
        if self.context is None:
            y = ops.scaled_dot_product_attention(q, k, v, mask, dropped, is_causal=self.causal, scale=self._scale(),
                                                 documents=documents, window=self.window, **self._more())
            if watched:
                self._note(greatest_scores(q, k, mask, self.causal, self._scale(), documents, self.window))
        else:
            more = self._more() | ({"dropped": dropped} if dropped else {}) | ({"note": self._note} if watched else {})
            y = self.context(q, k, v, self.causal, self._scale(), documents, self.window, **more)
        return self._merged(y, *gates)

    def _watched(self):
        """Whether somebody wants to know how large the scores of this forward are."""
        return (self.greatest is not None and self.training and not is_recomputing()
                and (self.context is None or self.context.watches))

    def _note(self, scores):
        """The heads' greatest scores, (heads,)."""
        self.greatest = to_device_of(self.greatest, lower(scores))
        assign(self.greatest, xp.maximum(self.greatest, lower(scores)))

    def _more(self):
        """What attention takes besides, by name, where there is any."""
        return {} if self.sinks is None else {"sinks": self.sinks()}

    def _dropped(self):
        """What drops weights now; 0.0: nothing does."""
        if self.dropout is None or not self.dropout.training:
            return 0.0
        if self.context is not None and not self.context.drops:
            raise ValueError(f"{type(self).__name__}: dropout {self.dropout.p} of weights, of which a part is here "
                             f"({self.context}): call model.eval(), or leave it out")
        return self.dropout

    def _merged(self, y, gates=None):
        """What all heads have found, (batch, heads, time, size), as the layer's result."""
        y = y if gates is None else y * ops.sigmoid(gates)
        y = ops.transpose(y, (0, 2, 1, 3))
        return self.out(ops.reshape(y, (*y.shape[:2], y.shape[2] * y.shape[3])))

    def extra_repr(self):
        parts = {f", kv_heads={self.kv_heads}": self.kv_heads != self.heads, ", causal": self.causal,
                 f", window={self.window}": self.window is not None, ", gated": self.gated,
                 f", rotary={self.rotary}": self.rotary not in (None, Rotary())}
        return f"{self.heads * self.size}, heads={self.heads}" + "".join(part for part, told in parts.items() if told)


class Sinks(Module):
    """A score of each head for what is no source: () -> (heads,); see ops.scaled_dot_product_attention."""

    def __init__(self, heads, dtype=xp.float32):
        super().__init__()
        self.score = Parameter(xp.zeros(heads, dtype))

    @by_position
    def forward(self):
        return self.score

    def extra_repr(self):
        return f"{self.score.shape[0]}"


def of_heads(h, size, *counts):
    """What lies side by side in features (batch, time, Σ counts · size), head by head: (batch, count, time, size) of
    each count."""
    h = ops.reshape(h, (*h.shape[:2], sum(counts), size))
    # Split first: then their gradients, put together, lie in memory as those of what has made h.
    return [ops.transpose(part, (0, 2, 1, 3)) for part in h.split(counts, 2)]


def unit_values(x, k):
    """Values of which attention gives its weights themselves, for keys k (batch, heads, time, size): the unit vectors,
    (batch, heads, time, time), of x's dtype."""
    return xp.broadcast_to(module_of(lower(x)).eye(k.shape[2], dtype=x.dtype), (*k.shape[:3], k.shape[2]))
