"""Attention to blocks of keys that each query chooses: autodiff/ops/chosen_blocks.py, as a layer."""

from ..autodiff import ops
from ..autodiff.modes import no_grad
from ..autodiff.ops.chosen_blocks import greatest_block_scores
from ..autodiff.primitive import lower
from ..backend import xp
from .attention import MultiHeadAttention, unit_values
from .decoding import by_position
from .module import at_least_1


class BlockAttention(MultiHeadAttention):
    """Causal self-attention, (batch, time, dim) -> (batch, time, dim), with MultiHeadAttention's arguments of the same
    names, parameters, context and scale. Each position looks at `count` blocks of `block_size` positions, its own among
    them; the others each head chooses anew for each position, among those that lie before.

        nn.GPT(…, window="4x64")        in all blocks of a GPT: 4 · 64 positions at most, of any number

    There are no more parameters than in MultiHeadAttention, so that a model may be trained with the one, and go on with
    the other. Packed documents are refused (ValueError): a block's mean key would be of several.
    Source: Lu et al. 2025, "MoBA: mixture of block attention for long-context LLMs".
    """

    keeps = "blocks"    # of keys and values, in a KeyValueCache

    def __init__(self, dim, heads, count, block_size, kv_heads=None, rotary=False, dtype=xp.float32, std=0.02,
                 bias=True, qk_norm=False, gated=False):
        super().__init__(dim, heads, kv_heads, True, rotary, dtype, std, bias, None, qk_norm, gated=gated)
        self.count, self.block_size = at_least_1("BlockAttention", count=count, block_size=block_size)

    def weights(self, x):
        self._check_whole("weights")
        with no_grad():
            q, k, *_ = self._queries_keys_values(x)
            return lower(ops.block_attention(q, k, unit_values(x, k), *self._rules()))

    @by_position
    def forward(self, x, documents=None):
        if documents is not None:
            raise ValueError(f"{type(self).__name__}: packed documents, whose blocks would have keys of several: train "
                             "on rows of one document each, or take another window")
        watched = self._watched()
        q, k, v, *gates = self._queries_keys_values(x)
        rules = self._rules()
        if self.context is not None:
            more = {"note": self._note} if watched else {}
            return self._merged(self.context.blocks(q, k, v, *rules, **more), *gates)
        if watched:
            self._note(greatest_block_scores(q, k, *rules))
        return self._merged(ops.block_attention(q, k, v, *rules), *gates)

    def _rules(self):
        """What the op takes besides queries, keys and values."""
        return self.block_size, self.count, self._scale()

    def extra_repr(self):
        return f"{super().extra_repr()}, {self.count} blocks of {self.block_size}"
