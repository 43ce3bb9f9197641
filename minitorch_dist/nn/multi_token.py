"""Multi-token prediction: from each position a model learns to tell several tokens ahead, one after the other.

    tokens        t₀    t₁    t₂    t₃    t₄
    GPT           h₀    h₁    h₂    h₃    h₄        next tokens  t₁ t₂ t₃ t₄ t₅
    further[0]    h′₀   h′₁   h′₂   h′₃             of h₀ and t₁, …: t₂ t₃ t₄ t₅
    further[1]    h″₀   h″₁   h″₂                   of h′₀ and t₂, …: t₃ t₄ t₅

Each depth is a block more, which takes what the depth before it has made of a position, and the embedding of the token
that it has predicted there. Embedding and output layer are the model's. In training that is more to learn from each
position; afterwards the further depths are left out, and the model is a plain GPT.

    model = MultiTokenPrediction(nn.GPT(…), depth=1)
    loss = multi_token_loss(model(tokens), targets) / TARGETS       # a sum; TARGETS of the GLOBAL batch
    loss = multi_token_loss(model(tokens, targets=targets)) / TARGETS       # the same, without logits
    model.eval()                                                    # now model(tokens) is model.model(tokens)

The loss is that of the next tokens, and weight/depth times the sum of the others'. All are sums that are divided by the
number of next tokens, as in the paper, though k positions per sequence have none at depth k. In packed rows, where
`documents` are given, a position counts at depth k where k positions behind it are of its document.

Or the first of them is kept, and guesses while the model writes (`speculate`): a guess costs one block, and the model
reads it together with the token before it, in one pass, which says whether it is right:

    the model has read … and says a        depth 1 guesses b        the model reads a b: after a comes b, after b c
                                           guesses d                reads c d: after c comes e, and d is forgotten

Sources: DeepSeek-AI 2024, "DeepSeek-V3 technical report", 2.2 (weight 0.3, at the end of training 0.1; depth 1), 5.4.3;
Stern et al. 2018, "Blockwise parallel decoding for deep autoregressive models"; Leviathan et al. 2023, "Fast inference
from transformers via speculative decoding".
"""

from math import inf
from typing import NamedTuple

from ..autodiff import ops
from ..autodiff.ops.attention import numbered
from ..autodiff.primitive import lower
from ..backend import number, to_device_of, whole, xp
from . import init
from .containers import ModuleList
from .decoding import KeyValueCache, beginning, by_position, evaluating
from .layers import Linear
from .loss import IGNORED, cross_entropy, wants_logits
from .module import Module
from .positions import places


class Further(Module):
    """A depth: (batch, time, dim) of the one before and embeddings of the tokens to come, of the same shape -> what the
    next depth takes, what the output layer takes, and the sum of auxiliary losses, or None."""

    def __init__(self, model, depth):
        super().__init__()
        dim, dtype, norm = model.embed.weight.shape[1], model.embed.weight.dtype, type(model.norm)
        self.norm_hidden, self.norm_token, self.norm = (norm(dim, dtype=dtype) for _ in range(3))
        self.join = Linear(2 * dim, dim, bias=False, dtype=dtype,
                           weight_init=lambda shape, dtype: init.normal(shape, 0.02, dtype))
        self.block = model.new_block(len(model.blocks) + depth)
        self.to(dtype).to(model.embed.weight.device)

    @by_position
    def forward(self, x, coming, aux=None, documents=None):
        x = self.join(ops.concatenate([self.norm_hidden(x), self.norm_token(coming)], 2))
        x = self.block(x if aux is None else (x, aux), *([] if documents is None else [documents]))
        x, aux = x if isinstance(x, tuple) else (x, None)
        return x, self.norm(x), aux


class MultiTokenPrediction(Module):
    """A GPT that is trained to predict 1 + depth tokens from each position.

    In training, of tokens (batch, time) and perhaps documents, as GPT's: logits in a tuple, of depth k (batch, time -
    k, vocabulary), k = 0 … depth; with experts a pair of this tuple and the sum of the auxiliary losses. In evaluation
    the GPT's own result. Given targets, integers (batch, time), it gives losses in the logits' place, as a GPT does,
    with z_loss too: of depth k (batch, time - k). ValueError unless there are more tokens than depths, and for a GPT
    that has a part of the sequences.
    """

    def __init__(self, model, depth=1):
        super().__init__()
        depth = whole("depth", depth)
        if depth < 1:
            raise ValueError(f"MultiTokenPrediction: depth={depth}; 1 or more tokens beside the next one")
        self.model, self.depth = model, depth
        self.further = ModuleList(Further(model, i) for i in range(depth))

    def forward(self, tokens, documents=None, targets=None, z_loss=0.0):
        if not self.training:
            return self.model(tokens, documents, targets, z_loss)
        if self.model.context is not None:
            raise ValueError("MultiTokenPrediction: positions are put together with later tokens, of which the GPT has "
                             f"a part ({self.model.context}): take one that is not divided")
        time = tokens.shape[1]
        if time <= self.depth:
            raise ValueError(f"MultiTokenPrediction: {time} tokens for depth={self.depth}: give {self.depth + 1} or "
                             "more")
        model, logits, here = self.model, wants_logits(targets, z_loss), lower(self.model.embed.weight)
        if documents is not None:
            documents = to_device_of(numbered(documents, tokens.shape), here)

        def at(depth, x):
            return model.scores(x) if logits else model.losses(x, targets_at(depth, targets, documents), z_loss)
        x, aux = model.features(tokens, documents)
        found = [at(0, model.norm(x))]
        for k, further in enumerate(self.further, 1):
            x, y, aux = further(x[:, :-1], model.embed(tokens[:, k:]), aux,
                                None if documents is None else documents[:, :time - k])
            found.append(at(k, y))
        return tuple(found) if aux is None else (tuple(found), aux)

    def generate(self, *args, **options):
        """GPT's."""
        return self.model.generate(*args, **options)

    def extra_repr(self):
        return f"depth={self.depth}"


def targets_at(depth, targets, documents=None):
    """What positions predict at some depth: integers (batch, time - depth) of those that they predict next, (batch,
    time); IGNORED where there is none, or it is of another document."""
    targets = lower(targets)
    found = targets[:, depth:]
    if documents is None:
        return found
    there = places(to_device_of(numbered(documents, targets.shape), targets))[:, depth:] >= depth
    return xp.where(there, found.astype(xp.int64), IGNORED)     # bytes have no IGNORED


def multi_token_loss(logits, targets=None, documents=None, weight=0.3, z_loss=0.0):
    """The sum of the losses: of the next tokens, and weight/depth times those of the tokens behind them.

    logits     a MultiTokenPrediction's, of its training; or its losses, where it was given the targets
    targets    integers (batch, time), the next tokens; IGNORED for none. None: the model was given them
    documents  what the model was given
    z_loss     as in cross_entropy, at each depth; ValueError where the model made the losses: give it to the model
    """
    if not 0 <= (weight := number(weight)) < inf:
        raise ValueError(f"multi_token_loss: weight={weight} of tokens behind the next ones: at least 0, and finite")
    if z_loss and targets is None:
        raise ValueError(f"multi_token_loss: z_loss={z_loss} of losses that the model has made already: give it to "
                         "the model, beside the targets")
    main, *further = (ops.sum(scores) if targets is None else
                      cross_entropy(scores, targets_at(depth, targets, documents), "sum", z_loss=z_loss)
                      for depth, scores in enumerate(logits))
    return main + weight / len(further) * sum(further[1:], further[0])


class Speculated(NamedTuple):
    """What `speculate` has written, and of how many guesses how many were right."""

    tokens: object
    guessed: int
    right: int


def speculate(model, tokens, count):
    """model.generate(tokens, count, temperature=0), with guesses of the first further depth: Speculated.

    The tokens are the same, but for rounding, where two are as likely. A right guess saves a pass of the model: 1 +
    guessed of them write 1 + guessed + right tokens, of which one may be too many. Of several rows a guess is right
    where it is in all of them; of divided experts in all ranks' rows, too, which are as many on each. ValueError for no
    token to begin with, for more tokens than the model's length, and for what can't keep keys and values
    (decoding.uncacheable).
    """
    gpt, depth = model.model, model.further[0]
    tokens = beginning("speculate", gpt, tokens, count)
    end, guessed, right = tokens.shape[1] + count, 0, 0
    if end > gpt.length:
        raise ValueError(f"speculate: {tokens.shape[1]} tokens and {count} more for a GPT of length {gpt.length}: "
                         "beyond it nothing is kept; take generate")
    cache, ahead = KeyValueCache(gpt, take_back=True), KeyValueCache(depth, gpt.length)
    together = {m.divided_over.name: m.divided_over for m in model.modules() if hasattr(m, "divided_over")}
    with evaluating(model):
        x, new = _likeliest(gpt, cache, tokens)
        coming, new = xp.concatenate([tokens[:, 1:], new[:, -1:]], 1), new[:, -1:]
        tokens = xp.concatenate([tokens, new], 1)
        while tokens.shape[1] < end:
            with ahead.reading(coming):
                guess = lower(gpt.scores(depth(x, gpt.embed(coming))[1][:, -1:])).argmax(2)
            x, new = _likeliest(gpt, cache, xp.concatenate([tokens[:, -1:], guess], 1))
            agreed = (new[:, :1] == guess).all()[None].astype(xp.int64)
            for comm in together.values():
                comm.all_reduce(agreed, "min")
            agreed = bool(agreed)
            guessed, right = guessed + 1, right + agreed
            if not agreed:
                cache.past -= 1
                x, new = x[:, :1], new[:, :1]
            coming, tokens = new, xp.concatenate([tokens, new], 1)
    return Speculated(tokens[:, :end], guessed, right)


def _likeliest(gpt, cache, tokens):
    """(features of more tokens, integers (batch, time): what is likeliest to come behind each)."""
    with cache.reading(tokens):
        x, _ = gpt.features(tokens)
        return x, lower(gpt.scores(gpt.norm(x))).argmax(2)
