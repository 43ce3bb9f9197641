"""Multi-head latent attention: a token's keys and values are made of one short vector, which is all that is kept of it.

    x ── down ─┬─ q_norm ─── q ──┬─ of each head: nope_size features, as they are ──────────────┬─ queries
               │                 └─ of each head: rope_size features, turned by the position ───┘
               ├─ kv_norm ── kv ─┬─ of each head: nope_size features ───────────────────────────┬─ keys
               │     │           └─ of each head: value_size features ── values                 │
               └─────┼── rope_size features, turned; one key for all heads ─────────────────────┘
                     └── kept for later tokens: kv_rank + rope_size numbers

Rotary positions need a part of their own: a position's rotation would stand between the matrix of the queries and that
of the keys. Without it these two meet: qᵀ (W_K c) = (W_Kᵀ q)ᵀ c. So a token that comes later asks the latents c
themselves: W_K is multiplied to its queries and W_V to what they find, and no key or value of the past is ever made
again. That is attention of all heads to one key, whose first kv_rank features are the value (`_absorbed`). It takes a
`kv` that is a matrix and nothing else (decoding.by_matrix); behind a bias, a hook or other layers all are made again.

Numbers kept per token and layer, of DeepSeek-V2's 128 heads of 128 features (kv_rank 512, rope_size 64):

    heads that have keys of their own     2 · 128 · 128    32,768      (MHA)
    8 groups of heads                     2 · 8 · 128       2,048      (GQA)
    one key for all                       2 · 128             256      (MQA)
    latent                                512 + 64            576      (as many as 2.25 groups)

Sources: DeepSeek-AI 2024, "DeepSeek-V2", 2.1 and table 1; "DeepSeek-V3 technical report", 2.1.1.
"""

from typing import NamedTuple

from ..autodiff import ops
from ..autodiff.primitive import lower
from ..backend import module_of, whole, xp
from . import init
from .attention import MultiHeadAttention
from .decoding import by_position
from .kept import OF_ONE_DOCUMENT
from .layers import Dropout, Linear
from .module import Module, at_least_1
from .norm import RMSNorm
from .positions import rotary_of


class Sizes(NamedTuple):
    """LatentAttention's, which see."""

    nope_size: int
    rope_size: int
    value_size: int
    kv_rank: int
    q_rank: int | None

    @property
    def down(self):
        """Features of what x is brought down to."""
        return (self.q_rank or 0) + self.kv_rank + self.rope_size


def sizes_of(dim, heads, nope_size=None, rope_size=None, value_size=None, kv_rank=None, q_rank=None):
    """Sizes, those that are None by default. ValueError for what can't be."""
    dim, heads = at_least_1("multi-head latent attention", dim=dim, heads=heads)
    nope_size = dim // heads if nope_size is None else whole("nope_size", nope_size)
    usual = max(2, nope_size // 4 * 2), nope_size, 4 * nope_size
    given = (default if size is None else size for size, default in zip(
        (rope_size, value_size, kv_rank), usual, strict=True))
    sizes = Sizes(*(None if size is None else whole(name, size) for name, size in zip(
        Sizes._fields, (nope_size, *given, q_rank), strict=True)))
    if min(size for size in sizes if size is not None) < 1 or sizes.rope_size % 2:
        given = ", ".join(f"{name}={size}" for name, size in sizes._asdict().items())
        raise ValueError(f"multi-head latent attention: {given} must be 1 or more, and rope_size even: rotary "
                         "positions turn pairs of features")
    return sizes


class LatentAttention(MultiHeadAttention):
    """Multi-head latent attention (MLA): (batch, time, dim) -> (batch, time, dim), with MultiHeadAttention's arguments
    of the same names, and its documents, context and scale (None: 1/√(nope_size + rope_size)).

    nope_size   features of a head's queries and keys without a position (default: dim/heads)
    rope_size   those with one, an even number (default: about half as many, as in DeepSeek-V2)
    value_size  features of a head's values (default: nope_size)
    kv_rank     of the latent of keys and values (default: 4 · nope_size, as in DeepSeek-V2)
    q_rank      of the queries' own latent; None: they are made of x
    bias        whether `down` and `out` have one; what makes heads of latents has none
    to_heads    None, or what the key of all heads goes through where ranks have some of the heads each, and each a
                part of its gradient; see parallel/tensor/heads.py
    """

    to_heads = None
    keeps = "latents"       # in a KeyValueCache

    def __init__(self, dim, heads, causal=False, dtype=xp.float32, std=0.02, bias=True, nope_size=None, rope_size=None,
                 value_size=None, kv_rank=None, q_rank=None, rotary=True, dropout=0.0):
        Module.__init__(self)
        dim, heads = at_least_1("multi-head latent attention", dim=dim, heads=heads)
        sizes = sizes_of(dim, heads, nope_size, rope_size, value_size, kv_rank, q_rank)
        self.nope_size, self.rope_size, self.value_size, self.kv_rank, self.q_rank = sizes
        self.size, self.heads, self.kv_heads = sizes.nope_size + sizes.rope_size, heads, heads
        self.causal, self.rotary = causal, rotary_of(rotary)
        if self.rotary is None:
            raise ValueError("multi-head latent attention: rotary=False, but what isn't turned is nope_size; leave "
                             "rotary out")

        def weights(shape, dtype):
            return init.normal(shape, std, dtype)
        self.down = Linear(dim, sizes.down, bias, dtype, weights)
        if self.q_rank is not None:
            self.q_norm = RMSNorm(self.q_rank, dtype=dtype)
        self.q = Linear(dim if q_rank is None else self.q_rank, heads * self.size, False, dtype, weights)
        self.kv_norm = RMSNorm(self.kv_rank, dtype=dtype)
        self.kv = Linear(self.kv_rank, heads * (self.nope_size + self.value_size), False, dtype, weights)
        self.out = Linear(heads * self.value_size, dim, bias, dtype, weights)
        if dropout:
            self.dropout = Dropout(dropout)

    def _queries_latents_key(self, x, documents=None):
        """(queries (batch, heads, time, size), latents (batch, time, kv_rank), the key of all heads (batch, 1, time,
        rope_size)), queries and key turned."""
        self._check(x)
        *of_queries, latents, key = self.down(x).split((*([] if self.q_rank is None else [self.q_rank]), self.kv_rank,
                                                        self.rope_size), 2)
        q = self.q(self.q_norm(*of_queries) if of_queries else x)   # may bring in positions that x hasn't
        key = key if self.to_heads is None else self.to_heads(key)
        q, key = (ops.transpose(ops.reshape(part, (*part.shape[:2], heads, size)), (0, 2, 1, 3))
                  for part, heads, size in ((q, self.heads, self.size), (key, 1, self.rope_size)))
        positions = self._positions(q.shape[2], documents)
        nope, rope = q.split((self.nope_size, self.rope_size), 3)
        q = ops.concatenate([nope, self.rotary.turn(rope, positions)], 3)
        return q, self.kv_norm(latents), self.rotary.turn(key, positions)

    def _queries_keys_values(self, x, documents=None):
        q, latents, key = self._queries_latents_key(x, documents)
        return q, *self._keys_values(latents, key)

    def _keys_values(self, latents, key):
        """Those of each head: (batch, heads, time, size), (batch, heads, time, value_size)."""
        h = self.kv(latents)
        h = ops.reshape(h, (*h.shape[:2], self.heads, self.nope_size + self.value_size))
        k, v = [ops.transpose(part, (0, 2, 1, 3)) for part in h.split((self.nope_size, self.value_size), 3)]
        k = ops.concatenate([k, ops.broadcast_to(key, (*k.shape[:3], self.rope_size))], 3)
        return k, v * 1.0       # a view of h would keep keys for backward that are in k as well

    @by_position
    def forward(self, x, documents=None):
        if not hasattr(self.context, "keep_latents"):
            return super().forward(x, documents)
        self._dropped()     # which raises where it should be something
        q, latents, key = self._queries_latents_key(x)
        own = ops.reshape(latents, (latents.shape[0], 1, *latents.shape[1:]))
        if documents is not None:
            raise ValueError(OF_ONE_DOCUMENT)
        self.context.keep_latents(ops.concatenate([own, key], 3))
        if not self.context.cache.past:     # each score is of size features then, instead of kv_rank + rope_size
            y = ops.scaled_dot_product_attention(q, *self._keys_values(latents, key), is_causal=True,
                                                 scale=self._scale())
        elif self._is_matrix():
            y = self._absorbed(q)
        else:
            kept = self.context.kept
            k, v = self._keys_values(kept[:, 0, :, :self.kv_rank], kept[..., self.kv_rank:])
            y = self.context.attend(q, k, v, self._scale())
        return self._merged(y)

    def _absorbed(self, q):
        """What queries find in a cache: (batch, heads, time, size) -> (batch, heads, time, value_size)."""
        matrix = ops.reshape(self._matrix(q), (self.heads, self.nope_size + self.value_size, self.kv_rank))
        nope, rope = q.split((self.nope_size, self.rope_size), 3)
        q = ops.concatenate([ops.matmul(nope, matrix[:, :self.nope_size]), rope], 3)
        y = self.context.attention(q, self.kv_rank, self._scale())
        return ops.matmul(y, ops.transpose(matrix[:, self.nope_size:], (0, 2, 1)))

    def _is_matrix(self):
        """Whether what `kv` does can be done to queries instead; otherwise keys and values are made anew each time."""
        return getattr(self.kv.forward, "by_matrix", False) and self.kv._hooks is None and self.kv.bias is None

    def _matrix(self, like):
        """What `kv` multiplies by, (heads · (nope_size + value_size), kv_rank), be it a Linear or what stands in the
        place of one: that is asked for each feature."""
        if getattr(self.kv, "product", ops.linear if type(self.kv) is Linear else None) is ops.linear:
            return self.kv.weight
        return ops.transpose(self.kv(module_of(lower(like)).eye(self.kv_rank, dtype=like.dtype)), (1, 0))

    def extra_repr(self):
        return f"heads={self.heads} of {self.nope_size}+{self.rope_size}, {self.value_size}, kv_rank={self.kv_rank}" + \
            (f", q_rank={self.q_rank}" if self.q_rank else "") + (", causal" if self.causal else "")
