"""Writing with a language model: token after token, each one's keys and values kept for those that follow.

    tokens given     5 9 2 7            read once; each attention keeps 4 keys and values
    then per token           3          one position is worked on, which looks at the 4 that are kept and at itself
                               8        …

Without what is kept, token t costs a forward of all t tokens before it. A position's keys and values depend on no later
one, so they stay right as long as no position changes its place: beyond the model's `length` the window slides, every
token's place changes with each new one, and the window is worked out anew for each.

The cache is what MultiHeadAttention calls its context: who knows which positions x has, and where the other keys are.
What is kept depends on the attention (kept.py).
Source: Pope et al. 2022, "Efficiently scaling transformer inference" (2.1).
"""

from contextlib import contextmanager

from .. import backend
from ..autodiff import ops
from ..autodiff.modes import no_grad
from ..autodiff.ops.indexing import numbers_in
from ..autodiff.primitive import lower
from ..backend import is_array, is_whole, to_device_of, whole, xp
from .containers import Sequential
from .kept import KEPT, Places
from .layers import GELU, Dropout, Identity, LeakyReLU, Linear, ReLU, Sigmoid, SwiGLU, Tanh
from .module import Module, at_least_1
from .moe import Experts, MoE
from .norm import LayerNorm, RMSNorm

COLDEST = 1e-200    # of temperatures above 0: a float32's logits over it are finite in float64


def by_position(forward):
    """Mark a Module's forward, or a hook of it, that, in evaluation, works on each position of (batch, time, …) by
    itself, or asks its `context` for the others."""
    forward.by_position = True
    return forward


def by_matrix(forward):
    """Mark a Module's forward that, in evaluation, multiplies each position by a matrix, adds its `bias` unless that is
    None, and does nothing else."""
    forward.by_matrix = True
    return by_position(forward)


by_matrix(Linear.forward)
for _layer in (Dropout, Experts, GELU, Identity, LayerNorm, LeakyReLU, MoE, ReLU, RMSNorm, Sequential, Sigmoid,
               SwiGLU, Tanh):
    by_position(_layer.forward)


def uncacheable(model):
    """Why a model's tokens can't be read one after another: a text; None where they can.

    Every module must be known to work on each position by itself: its forward and its hooks are marked by by_position,
    and nobody has put another forward in its place (a mt.checkpoint of it is none). Of those that are, a mixture must
    have room for all that its tokens choose, and a part of a model that is cut must have whole sequences.
    """
    for path, m in model.named_modules():
        name = f"{path or 'the model'}, of class {type(m).__name__}"
        if type(m).forward is not Module.forward and not getattr(m.forward, "by_position", False):
            return f"{name}, is not known to work on each position by itself"
        if any(not getattr(hook, "by_position", False) for hooks in m._hooks or () for hook, _ in hooks):
            return f"{name}, has a hook that is not known to work on each position by itself"
        if any(hasattr(getattr(m, parameter), "comms") for parameter in m._parameters):
            return f"{name}, lies on a mesh"
        if getattr(m, "sequence_parallel", False):
            return f"{name}, divides the sequences over ranks"
        product = getattr(m, "product", ops.linear)
        if product is not ops.linear and not getattr(product, "by_position", False):
            return f"{name}, makes its products by {product}, which is not known to work on each position by itself"
        if not getattr(m, "causal", True):
            return f"{name}, looks at later positions"
        if isinstance(m, MoE):
            experts = m.router.weight.shape[0]
            if m.capacity_factor is not None and m.capacity_factor * m.k < experts:
                return (f"{name}, drops tokens that others leave no room for: capacity_factor={m.capacity_factor}, and "
                        f"only None, or experts/k = {experts / m.k:g}, drops none")
            if m.group not in (None, "sequence"):
                return f"{name}, routes {m.group} tokens together, and a new one comes alone"
    return None


class KeyValueCache:
    """What a model's attentions keep of the tokens that it has read: keys and values, for up to `length` positions.

        cache = KeyValueCache(model)
        logits = cache.read(tokens)         # (batch, time, vocabulary), as model(tokens)
        logits = cache.read(more)           # (batch, time', vocabulary): the last ones of model(tokens, then more)

    Of a decoder, whose blocks look at a memory: cache.read(tokens, memory, …), what else the model takes. The memory's
    keys and values are made at the first read.

    model   a GPT, whole or cut by tensor parallelism (then a rank keeps its heads'). ValueError unless uncacheable(it)
            is None
    length  positions that there is room for (default: the model's), 1 or more
    take_back  whether `past` may be made smaller where attention is by states, by what the last read has brought, or
            less: this takes a second state, and keys and values of one read. Other attention allows that in any case
    past    how many tokens have been read. All calls have the same batch; ValueError where it isn't, or they come to
            more than `length` or the model's
    nbytes  of keys and values: 2 · layers · batch · kv_heads · length · size numbers, from the first read on; of
            attention with a window 2 · window for the length, if that is less, but for what one read brings that is
            longer, until the next; of multi-head latent attention layers · batch · length · (kv_rank + rope_size), on
            each rank that has some of the heads; of attention by states layers · batch · heads · size², whatever the
            length; of attention to a memory as of keys and values, of its sources

    For evaluation, under no_grad(): gradients don't reach what is kept.
    """

    def __init__(self, model, length=None, take_back=False):
        if reason := uncacheable(model):
            raise ValueError(f"KeyValueCache: {reason}: work on all tokens anew for each (generate(…, cache=False))")
        self.model, self.past, self.tokens, self.take_back = model, 0, None, take_back
        self.length = model.length if length is None else length
        self.length, = at_least_1("KeyValueCache", length=self.length)
        self.layers = {id(m): (m, KEPT[getattr(m, "keeps", "keys")](self)) for m in model.modules()
                       if m is not model and hasattr(m, "context")}

    @property
    def nbytes(self):
        """Bytes of the keys and values."""
        return sum(array.nbytes for _, kept in self.layers.values() for array in kept.arrays if array is not None)

    def read(self, tokens, *more):
        """The logits (batch, time, vocabulary) of the tokens (batch, time), which come after those read before. more:
        what the model takes besides."""
        with self.reading(tokens):
            logits = self.model(tokens, *more)
        return logits[0] if isinstance(logits, tuple) else logits

    @contextmanager
    def reading(self, tokens):
        """Inside, the model, or what it is made of, works on these tokens (batch, time), and keeps what is theirs. Who
        takes some back makes `past` smaller."""
        tokens = numbers_in(tokens)
        if tokens.ndim != 2:
            raise ValueError(f"KeyValueCache: tokens {tuple(tokens.shape)} must be (batch, time); of one sequence, (1, "
                             "time): tokens[None]")
        if self.past + tokens.shape[1] > self.length:
            raise ValueError(f"KeyValueCache of length {self.length} was given {self.past + tokens.shape[1]} tokens: "
                             "make one with more room, if the model has it")
        if self.past and len(tokens) != len(self.tokens):
            raise ValueError(f"KeyValueCache: {len(tokens)} rows of tokens, where {len(self.tokens)} have been read "
                             "before: all calls have the same")
        self.tokens = tokens
        with self._told(), no_grad():
            yield
        self.past += tokens.shape[1]

    @contextmanager
    def _told(self):
        """The model and its attentions know where they are."""
        told = [(self.model, Places(self)), *self.layers.values()]
        for module, context in told:
            module.context = context
        try:
            yield
        finally:
            for module, _ in told:
                del module.context      # the class has None


def generate(model, tokens, count, temperature=1.0, stream=None, end=None, cache=None, top_k=None, top_p=None):
    """GPT.generate, which see."""
    if model.context is not None:
        raise ValueError(f"generate: each rank has a part of the sequences ({model.context}), and a new token would "
                         "move them: load the state_dict into a GPT that is not divided")
    if not (temperature == 0 or temperature >= COLDEST):
        raise ValueError(f"generate: temperature={temperature}: 0, which takes the likeliest, or {COLDEST} or more")
    if top_k is not None and not (is_whole(top_k) and top_k >= 1) or top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"generate: top_k={top_k}, top_p={top_p}: a number of tokens, 1 or more, and a probability "
                         "above 0, up to 1; None leaves all of them")
    tokens, end = beginning("generate", model, tokens, count), None if end is None else whole("end", end)
    stream = stream or backend.next_stream()
    kept = KeyValueCache(model) if cache or cache is None and uncacheable(model) is None else None
    together = {m.divided_over for m in model.modules() if hasattr(m, "divided_over") and m.divided_over.size > 1}
    ended = None
    with evaluating(model):
        for _ in range(count):
            logits = _last_logits(model, tokens, kept)
            if temperature == 0:
                new = logits.argmax(1)
            else:
                # Gumbel's trick: the argmax of logits plus this noise is a sample of the softmax.
                noise = to_device_of(stream.gumbel(size=logits.shape), logits)
                logits = likeliest(logits.astype(xp.float64) / temperature, top_k, top_p)   # in float16 perhaps inf
                new = (logits + noise).argmax(1)
            if ended is not None:
                new = xp.where(ended, end, new)
            tokens = xp.concatenate([tokens, new[:, None]], 1)
            if end is not None:
                ended = tokens[:, -1] == end
                if not _going_on(ended, together):
                    break
    return tokens


def _going_on(ended, together):
    """Whether a row hasn't ended, or one of the ranks' that go through the model with this one. together: those that
    modules are divided over; of several, nobody knows who waits for whom, and all go on."""
    left = xp.array([int((~ended).sum())])
    if len(together) > 1:
        return True
    for comm in together:
        comm.all_reduce(left)
    return bool(left[0])


def likeliest(logits, top_k=None, top_p=None):
    """logits (batch, vocabulary), float64, with -inf for all but the likeliest: top_k of them, then those whose
    probabilities come together to top_p. Ties with the last of them stay."""
    if top_k is not None and top_k < logits.shape[1]:
        logits = xp.where(logits < xp.sort(logits, 1)[:, -top_k, None], -xp.inf, logits)
    if top_p is not None:
        falling = -xp.sort(-logits, 1)
        shares = xp.exp(falling - falling[:, :1])
        before = shares.cumsum(1) - shares
        least = xp.where(before < top_p * shares.sum(1, keepdims=True), falling, xp.inf).min(1, keepdims=True)
        logits = xp.where(logits < least, -xp.inf, logits)
    return logits


def beginning(who, model, tokens, count):
    """The tokens, int64 (batch, time), that `count` more are written behind, on the GPT's device. ValueError without
    any, and for a negative count."""
    tokens, count = lower(tokens), whole("count", count)
    tokens = to_device_of(tokens if is_array(tokens) else xp.asarray(tokens), lower(model.embed.weight))
    if tokens.ndim != 2 or not tokens.shape[1] or count < 0:
        raise ValueError(f"{who}: tokens {tuple(tokens.shape)}, count={count}: give (batch, 1 or more), and 0 or more")
    # Of uint64 and the int64 that come behind NumPy would make floats.
    return tokens.astype(xp.int64, copy=False) if tokens.dtype.kind in "iu" else tokens


@contextmanager
def evaluating(model):
    """Inside, a model is in evaluation mode and records nothing; afterwards each module is in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def _last_logits(model, tokens, kept):
    """What may come next: (batch, vocabulary)."""
    if kept is not None and tokens.shape[1] <= model.length:
        logits = kept.read(tokens[:, kept.past:])
    else:
        logits = model(tokens[:, -model.length:])
    logits = (logits[0] if isinstance(logits, tuple) else logits)[:, -1]
    return lower(logits.full() if hasattr(logits, "full") else logits)
