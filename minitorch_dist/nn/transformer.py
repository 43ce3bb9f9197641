"""Transformer blocks and GPT. Sequences are (batch, time, dim)."""

import functools
import math

from ..autodiff import ops
from ..autodiff.ops.attention import numbered
from ..autodiff.ops.indexing import numbers_in
from ..autodiff.primitive import lower
from ..backend import number, to_device_of, xp
from . import decoding, init
from .attention import MultiHeadAttention
from .block_attention import BlockAttention
from .containers import Sequential, called
from .cross_attention import CrossAttention
from .decoding import by_position
from .latent import LatentAttention
from .layers import GELU, Dropout, Linear, SwiGLU
from .linear_attention import OF_STATES
from .loss import linear_cross_entropy, wants_logits
from .module import Module, Parameter, at_least_1
from .moe import MoE
from .norm import LayerNorm, RMSNorm
from .positions import Rotary, places
from .windows import STATES, blocks_of, window_of, windows_of


class Embedding(Module):
    """Row i of the weight for the integer i: (…) -> (…, embedding_dim). weight (num_embeddings, embedding_dim).

    A slice takes these rows as they stand, without the detour by integers: (stop - start, embedding_dim).
    """

    def __init__(self, num_embeddings, embedding_dim, dtype=xp.float32, std=1.0):
        super().__init__()
        shape = at_least_1("Embedding", num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        self.weight = Parameter(init.normal(shape, std, dtype))

    @by_position
    def forward(self, indices):
        return self.weight[indices] if isinstance(indices, slice) else ops.embedding(indices, self.weight)

    def attend(self, x):
        """Scores of all rows, x Wᵀ: (…, embedding_dim) -> (…, num_embeddings), the output layer of tied weights."""
        return ops.linear(x, self.weight)

    def losses(self, x, targets, z_loss=0.0):
        """nn.linear_cross_entropy of attend's scores, (…), without them: (…, embedding_dim), integers (…)."""
        return linear_cross_entropy(x, self.weight, targets, "none", z_loss=z_loss)

    def extra_repr(self):
        return ", ".join(map(str, self.weight.shape))


class FeedForward(Sequential):
    """Layers one after another. A Linear and a GELU at the beginning run as one op, ops.linear_gelu, as long as nobody
    looks in between: both are of exactly these classes and neither has a hook. Names and bits are Sequential's."""

    @by_position
    def forward(self, x):
        layers = list(self._modules.items())
        if len(layers) > 1 and _plain(layers[0][1], Linear) and _plain(layers[1][1], GELU):
            (_, linear), (_, gelu), *layers = layers
            x = ops.linear_gelu(x, linear.weight, linear.bias, gelu.approximate)
        for name, layer in layers:
            with called(layer, name):
                x = layer(x)
        return x


def is_gated(mlp):
    """Whether the first of some layers makes two halves for a SwiGLU behind it."""
    return isinstance(mlp, Sequential) and len(mlp) > 1 and isinstance(mlp[1], SwiGLU)


def _plain(layer, kind):
    """Whether a call of the layer does what this class says and nothing else."""
    return type(layer) is kind and _bare(layer)


def _bare(layer):
    """Whether a call of the layer does what its class says and nothing else."""
    return layer._hooks is None and "forward" not in vars(layer)


def _has_losses_of(scores, kind):
    """Whether a class of output layers has a method `losses` of what this method of its own gives."""
    first = next((c for c in kind.__mro__ if {scores, "losses"} & vars(c).keys()), Module)
    return {scores, "losses"} <= vars(first).keys()


NORMS = {"layer": LayerNorm, "rms": RMSNorm}
# How many times hidden features the first matrix makes, and what stands behind it.
MLPS = {"gelu": (1, lambda: GELU("tanh")), "swiglu": (2, SwiGLU)}


def feed_forward(dim, hidden, mlp, bias, dtype, std):
    """A block's MLP, dim -> hidden -> dim, of one of MLPS. SwiGLU's gate and up are one matrix, as queries, keys and
    values are: one product, and one message where it is cut. Sources: Shazeer 2020, "GLU variants improve transformer";
    the one matrix is Megatron-LM's."""
    if mlp not in MLPS:
        raise ValueError(f"TransformerBlock: mlp={mlp!r}; use {' or '.join(map(repr, MLPS))}")
    times, activation = MLPS[mlp]

    def weights(shape, dtype):
        return init.normal(shape, std, dtype)
    return FeedForward(Linear(dim, times * hidden, bias, dtype, weights), activation(),
                       Linear(hidden, dim, bias, dtype, weights))


class TransformerBlock(Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): (batch, time, dim) -> the same. Pre-norm. documents: attention's.
    memory and memory_mask: with cross=True, and then always, what its CrossAttention takes.

    mlp     "gelu", or "swiglu": down(silu(gate(x)) · up(x)), where gate and up are the halves of mlp[0]
    hidden  features within it, or within each expert (default: 4 · dim)
    bias    whether the Linears have one
    moe     MoE's arguments, by name: the MLP is a mixture of experts. Then the result is a pair, of which the second is
            the sum of the auxiliary losses so far; the next block takes it as its input
    latent  LatentAttention's sizes, by name ({}: all by default): multi-head latent attention, with rotary positions
    rotary, qk_norm, window  MultiHeadAttention's
    window  also "linear" or "delta": attention is LinearAttention or DeltaAttention, which is causal (else ValueError),
            and has neither kv_heads, rotary positions nor latents
    window  also "4x64": attention is BlockAttention of 4 blocks of 64, which is causal (else ValueError), and has no
            latents
    cross   between the two, x + cross_attention(norm(x), memory): a decoder's block, which reads what an encoder has
            made, (batch, sources, dim). Of several: Sequential(*blocks)(x, None, memory, memory_mask)
    attention_dropout  MultiHeadAttention's dropout, of weights, where `dropout` is of results. ValueError beside states
            and blocks
    sinks   MultiHeadAttention's. ValueError beside latents, states and blocks
    gated   MultiHeadAttention's. States have gates in any case; ValueError beside latents
    """

    cross_norm = cross_attention = None

    def __init__(self, dim, heads, kv_heads=None, causal=False, rotary=False, dropout=0.0, norm="layer",
                 dtype=xp.float32, std=0.02, moe=None, mlp="gelu", hidden=None, bias=True, latent=None, window=None,
                 qk_norm=False, cross=False, attention_dropout=0.0, sinks=False, gated=False):
        super().__init__()
        dim, heads, hidden = at_least_1("TransformerBlock", dim=dim, heads=heads, hidden=hidden)
        hidden = 4 * dim if hidden is None else hidden
        if norm not in NORMS:
            raise ValueError(f"TransformerBlock: norm={norm!r}; use {' or '.join(map(repr, NORMS))}")
        of_states, blocks = OF_STATES.get(window), blocks_of(window)
        if of_states and not causal:
            raise ValueError(f"TransformerBlock: window={window!r} with causal={causal}: {of_states.__name__} is "
                             "causal: say so, or take another window")
        if isinstance(window, str) and not (of_states or blocks):
            raise ValueError(f"TransformerBlock: window={window!r}; take a number of positions, {', '.join(STATES)}, "
                             "or blocks like 4x64")
        if blocks and (not causal or attention_dropout or sinks):
            raise ValueError(f"TransformerBlock: window={window!r} with causal={causal}, attention_dropout="
                             f"{attention_dropout}, sinks={sinks}: blocks are chosen among those before, and no "
                             "weights are dropped or lost to sinks: take causal=True, and leave the others out")
        if of_states and attention_dropout:
            raise ValueError(f"TransformerBlock: attention_dropout={attention_dropout} with window={window!r}: "
                             f"{of_states.__name__} has no weights to be dropped: leave it out")
        if sinks and (of_states or latent is not None):
            raise ValueError(f"TransformerBlock: sinks={sinks} with window={window!r}, latent={latent}: they are of "
                             "attention with keys for its heads: leave them out")
        if gated and latent is not None:
            raise ValueError(f"TransformerBlock: gated={gated} with latent={latent}: multi-head latent attention has "
                             "no gates: leave one of them out")
        if latent is not None and (not rotary or kv_heads not in (None, heads)):
            raise ValueError("TransformerBlock: multi-head latent attention has rotary positions and keys for each "
                             f"head, not rotary={rotary}, kv_heads={kv_heads}: leave kv_heads out, and of a GPT take "
                             "positions=\"rotary\"")
        if latent is not None and not of_states and (window is not None or qk_norm):
            raise ValueError("TransformerBlock: multi-head latent attention has norms of its own, and no window, not "
                             f"qk_norm={qk_norm}, window={window}: leave these out")
        self.norm1 = NORMS[norm](dim, dtype=dtype)
        if of_states:
            self.attention = of_states(dim, heads, dtype, std, bias, qk_norm)
        elif blocks:
            self.attention = BlockAttention(dim, heads, *blocks, kv_heads, rotary, dtype, std, bias, qk_norm, gated)
        elif latent is not None:
            self.attention = LatentAttention(dim, heads, causal, dtype, std, bias, rotary=rotary,
                                             dropout=attention_dropout, **latent)
        else:
            self.attention = MultiHeadAttention(dim, heads, kv_heads, causal, rotary, dtype, std, bias, window, qk_norm,
                                                attention_dropout, sinks, gated)
        if cross:
            self.cross_norm = NORMS[norm](dim, dtype=dtype)
            self.cross_attention = CrossAttention(dim, heads, kv_heads, None, dtype, std, bias, qk_norm,
                                                  attention_dropout)
        self.norm2 = NORMS[norm](dim, dtype=dtype)
        self.mlp = feed_forward(dim, hidden, mlp, bias, dtype, std) if moe is None else \
            MoE(dim, hidden, **{"dtype": dtype, "std": std, "mlp": mlp} | moe)
        self.dropout = Dropout(dropout)

    @by_position
    def forward(self, x, documents=None, memory=None, memory_mask=None):
        if (memory is None) != (self.cross_attention is None):
            raise ValueError(f"TransformerBlock: cross={self.cross_attention is not None}, and "
                             f"{'no memory' if memory is None else 'a memory'} was given: a block that is made with "
                             "cross=True takes one, block(x, None, memory), and others don't")
        x, aux = x if isinstance(x, tuple) else (x, None)
        more = () if documents is None else (documents,)
        x = x + self.dropout(self.attention(self.norm1(x), *more))
        if memory is not None:
            x = x + self.dropout(self.cross_attention(self.cross_norm(x), memory, memory_mask))
        y = self.mlp(self.norm2(x))
        if isinstance(y, tuple):
            y, own = y
            aux = own if aux is None else aux + own
        x = x + self.dropout(y)
        return x if aux is None else (x, aux)


def _block(layers, *args, **options):
    """A TransformerBlock of a GPT of so many."""
    block = TransformerBlock(*args, **options)
    ends = block.mlp.ends if isinstance(block.mlp, MoE) else [block.mlp[2].weight]
    for last in (block.attention.out.weight, *ends):
        last.data *= xp.asarray(1 / math.sqrt(2 * layers), last.dtype)
    return block


# GPT's arguments, by what it is like.
LLAMA = {"positions": "rotary", "norm": "rms", "mlp": "swiglu", "bias": False}
FAMILIES = {"gpt": {}, "llama": LLAMA, "deepseek": LLAMA | {"latent": {}}}


class GPT(Module):
    """A decoder-only language model: integers (batch, time ≤ length) -> logits (batch, time, vocabulary).

    model(tokens, documents) with the number of each position's document, integers (batch, time), works on several
    documents in a row (data/packing.py) as on each alone: nobody looks into another, and positions begin anew in each,
    wherever the number changes. So numbers are a stretch each. With targets=, the integers (batch, time) to predict, it
    gives the losses (batch, time) in place of the logits, which then never exist as a whole (see losses); z_loss= is
    cross_entropy's, for these.

    positions   "learned" (a table of `length` rows), "rotary", or a Rotary, which has other angles
    tied        the output layer is the embedding's weight
    mlp, hidden, bias, latent, qk_norm, attention_dropout, sinks, gated  the blocks'; see TransformerBlock
    window      None, or the blocks' window, or a sequence of one for each block, which begins anew where there are more
                blocks: (1024,) * 5 + (None,) for five that see near positions and one that sees all, as in Gemma 3;
                ("linear",) * 3 + (None,), or ("delta",) * 3 + (None,) as in Qwen3-Next, for three that keep what they
                have read as a state, and one with keys; "4x64" for 4 blocks of 64, which each position chooses
    moe         MoE's arguments, by name: every block's MLP is a mixture of experts, and the result a pair, (logits,
                the sum of the auxiliary losses)
    context     None, or whose part of the sequences the tokens are; see MultiHeadAttention
    output_multiplier  None, or what logits are multiplied by
    FAMILIES["llama"] has the arguments that make it a LLaMA, but for its sizes; tied=False, as published. "deepseek"
    has multi-head latent attention besides; its experts are moe's.
    Weights N(0, 0.02²), those that end a residual branch divided by √(2·layers). Sources: Radford et al. 2019, "GPT-2";
    Touvron et al. 2023, "LLaMA"; DeepSeek-AI 2024, "DeepSeek-V2"; Gemma Team 2025, "Gemma 3" (windows by block).
    """

    context = output_multiplier = None

    def __init__(self, vocabulary, length, layers=4, heads=4, dim=128, kv_heads=None, dropout=0.0, positions="learned",
                 norm="layer", tied=True, dtype=xp.float32, moe=None, mlp="gelu", hidden=None, bias=True, latent=None,
                 window=None, qk_norm=False, attention_dropout=0.0, sinks=False, gated=False):
        super().__init__()
        if not (isinstance(positions, Rotary) or positions in ("learned", "rotary")):
            raise ValueError(f"GPT: positions={positions!r}; use 'learned', 'rotary' or a Rotary")
        vocabulary, length, layers, heads, dim = at_least_1("GPT", vocabulary=vocabulary, length=length, layers=layers,
                                                            heads=heads, dim=dim)
        self.length, self.positions = length, positions
        self.embed = Embedding(vocabulary, dim, dtype, std=0.02)
        if positions == "learned":
            self.position = Embedding(length, dim, dtype, std=0.02)
        self.dropout = Dropout(dropout)
        self.windows = windows_of(window)
        rotary = positions if isinstance(positions, Rotary) else positions == "rotary"
        self._block = functools.partial(_block, layers, dim, heads, kv_heads, True, rotary, dropout, norm, dtype,
                                        moe=moe, mlp=mlp, hidden=hidden, bias=bias, latent=latent, qk_norm=qk_norm,
                                        attention_dropout=attention_dropout, sinks=sinks, gated=gated)
        self.blocks = Sequential(*(self.new_block(i) for i in range(layers)))
        self.norm = NORMS[norm](dim, dtype=dtype)
        self.head = None if tied else Linear(dim, vocabulary, bias=False, dtype=dtype,
                                             weight_init=lambda shape, dtype: init.normal(shape, 0.02, dtype))

    def new_block(self, i):
        """A block with new values, as the i-th of them is."""
        return self._block(window=window_of(self.windows, i))

    @by_position
    def forward(self, tokens, documents=None, targets=None, z_loss=0.0):
        x, aux = self.features(tokens, documents)
        x = self.norm(x)
        y = self.scores(x) if wants_logits(targets, z_loss) else self.losses(x, targets, z_loss)
        return y if aux is None else (y, aux)

    def features(self, tokens, documents=None):
        """What the last block gives, (batch, time, dim), and the sum of the auxiliary losses, or None."""
        if documents is not None:
            documents = numbered(documents, numbers_in(tokens).shape)
            documents = documents if self.context is None else self.context.whole(documents)
        x, more = self.embedded(tokens, documents)
        x = self.blocks(x, *more)
        return x if isinstance(x, tuple) else (x, None)

    def embedded(self, tokens, documents=None):
        """What the first block takes: x (batch, time, dim), and a tuple of what else, the documents, if there are any:
        integers (batch, time), of whole sequences."""
        tokens = tokens if hasattr(tokens, "shape") else numbers_in(tokens)
        if len(tokens.shape) != 2:
            raise ValueError(f"GPT: tokens {tuple(tokens.shape)} must be (batch, time); of packed rows, (batch, time, "
                             "2), the documents are an argument of their own: model(*packing.apart(rows))")
        part = tokens.shape[1]
        time = part if self.context is None else self.context.length(part)
        if time > self.length:
            raise ValueError(f"GPT of length {self.length} was given {time} tokens: cut them")
        x = self.embed(tokens)
        positions = slice(time) if self.context is None else self.context.positions(part)
        more = ()
        if documents is not None:
            documents = to_device_of(documents, lower(x))
            positions, more = places(documents)[:, positions], (documents,)
        if self.positions == "learned":
            x = x + self.position(positions)
        return self.dropout(x), more

    def scores(self, x):
        """The output layer: logits (batch, time, vocabulary) of features (batch, time, dim) behind a norm."""
        x = x if self.output_multiplier is None else number(self.output_multiplier) * x
        return self.embed.attend(x) if self.head is None else self.head(x)

    def losses(self, x, targets, z_loss=0.0):
        """-log softmax(logits)[target] (batch, time), 0 where a target is -100, of features (batch, time, dim) behind a
        norm and integers (batch, time), without the logits: ops.linear_cross_entropy, and z_loss as in cross_entropy.
        ValueError where the output layer does more than a product: hooks, adapters."""
        tied = self.head is None
        layer, scores = (self.embed, "attend") if tied else (self.head, "forward")
        if not (_has_losses_of(scores, type(layer)) and (tied or _bare(layer) and layer.bias is None)):
            raise ValueError(f"GPT: targets want an output layer that is a product with one matrix and nothing else, "
                             f"not {layer!r}, which has more to it: leave them out, and take the loss of the logits")
        x = x if self.output_multiplier is None else number(self.output_multiplier) * x
        return layer.losses(x, targets, z_loss)

    def generate(self, tokens, count, temperature=1.0, stream=None, end=None, cache=None, top_k=None, top_p=None):
        """tokens (batch, time) continued by `count` sampled ones, int64 (batch, time + count), on the model's device.

        temperature  0 takes the likeliest; else decoding.COLDEST or more
        top_k        draw from so many tokens, the likeliest (Fan et al. 2018), and those as likely as the last of them
        top_p        of these from the likeliest that together have a probability of top_p or more at this temperature,
                     and those as likely as the last of them (Holtzman et al. 2019, "nucleus sampling")
        stream       a np.random.Generator (default: the library's), or what has its gumbel(size=(batch, vocabulary))
        end          the token that ends a row: the row's later ones are `end` too, and when all rows have ended, so
                     does the result, shorter; of divided experts when those of all their ranks have, which go on
                     together, by a sum of 8 bytes per token
        cache        keep keys and values, so that a token costs one position's work (decoding.py). None: where
                     decoding.uncacheable(self) is None; True: ValueError elsewhere; False: work on all tokens anew for
                     each. The tokens are the same, but for rounding
        """
        return decoding.generate(self, tokens, count, temperature, stream, end, cache, top_k, top_p)
