"""Attention to another sequence: what a decoder reads of its encoder, an answer of its question.

    x ─────── q ── queries ──┐
                             ├─ attention ── out          each position of x sees all of memory, or what a mask lets it
    memory ── kv ─┬─ keys ───┤
                  └─ values ─┘                            kept while a model writes: memory is what it was

Memory has no places here: where its order matters, what has made it must have said so.
Source: Vaswani et al. 2017, 3.2.3 ("encoder-decoder attention").
"""

from ..autodiff import ops
from ..autodiff.modes import no_grad
from ..autodiff.ops.attention import greatest_scores
from ..autodiff.primitive import lower
from ..backend import xp
from . import init
from .attention import MultiHeadAttention, of_heads, unit_values
from .decoding import by_position
from .layers import Dropout, Linear
from .module import Module, at_least_1
from .norm import RMSNorm


class CrossAttention(MultiHeadAttention):
    """(batch, time, dim), memory (batch, sources, memory_dim) -> (batch, time, dim): keys and values are memory's. With
    MultiHeadAttention's arguments of the same names, its scale, and its mask, of (…, time, sources).

    memory_dim  features of memory (default: dim)

    Where memory is padded, mask=there[:, None, None, :] leaves that out; there: bool (batch, sources).
    """

    keeps = "memory"        # its keys and values, in a KeyValueCache

    def __init__(self, dim, heads, kv_heads=None, memory_dim=None, dtype=xp.float32, std=0.02, bias=True,
                 qk_norm=False, dropout=0.0):
        Module.__init__(self)
        dim, heads, kv_heads, memory_dim = at_least_1("CrossAttention", dim=dim, heads=heads, kv_heads=kv_heads,
                                                      memory_dim=memory_dim)
        self._share(dim, heads, kv_heads)

        def weights(shape, dtype):
            return init.normal(shape, std, dtype)
        self.q = Linear(dim, dim, bias, dtype, weights)
        self.kv = Linear(dim if memory_dim is None else memory_dim, 2 * self.kv_heads * self.size, bias, dtype, weights)
        if qk_norm:
            self.q_norm, self.k_norm = (RMSNorm(self.size, dtype=dtype) for _ in range(2))
        self.out = Linear(dim, dim, bias, dtype, weights)
        if dropout:
            self.dropout = Dropout(dropout)

    def _queries(self, x):
        self._check(x)
        q, = of_heads(self.q(x), self.size, self.heads)
        return q if self.q_norm is None else self.q_norm(q)

    def keys_values(self, memory):
        """Those of a memory: (batch, kv_heads, sources, size) each."""
        if len(memory.shape) != 3:
            raise ValueError(f"{type(self).__name__}: memory {tuple(memory.shape)} must be (batch, sources, "
                             "memory_dim)")
        k, v = of_heads(self.kv(memory), self.size, self.kv_heads, self.kv_heads)
        return (k if self.k_norm is None else self.k_norm(k)), v

    def _queries_keys_values(self, x, memory):
        q = self._queries(x)
        k, v = self.keys_values(memory) if self.context is None else self.context.of_memory(self, memory)
        return self._of_one_dtype(q, k, v)

    def weights(self, x, memory, mask=None):
        """Where each position of x looks: (batch, heads, time, sources), rows adding up to 1; to be looked at."""
        self._check_whole("weights")
        with no_grad():
            q, k, _ = self._queries_keys_values(x, memory)
            return lower(ops.scaled_dot_product_attention(q, k, unit_values(x, k), mask, scale=self._scale()))

    @by_position
    def forward(self, x, memory, mask=None):
        q, k, v = self._queries_keys_values(x, memory)
        if self._watched():
            self._note(greatest_scores(q, k, mask, scale=self._scale()))
        return self._merged(ops.scaled_dot_product_attention(q, k, v, mask, self._dropped(), scale=self._scale()))

    def extra_repr(self):
        return f"{self.heads * self.size}, heads={self.heads}" + (
            f", kv_heads={self.kv_heads}" if self.kv_heads != self.heads else "")
