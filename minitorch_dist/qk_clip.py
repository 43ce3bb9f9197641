"""QK-clip: after a step, heads whose attention scores have grown too large get smaller weights for queries and keys.

    clip = QKClip(model, threshold=100.0)
    for batch in loader.epoch(0):
        …                                       # forward and backward
        optimizer.step()
        scores = clip.step()                    # print it: each head's greatest score in this step's forwards

    s = the greatest score q·k · scale of a head, over the global batch        γ = threshold / s, where s is above it

    W_q ← √γ W_q    W_k ← √γ W_k        of this head alone: with the same x its scores are γ times what they were
    W_q ← γ W_q                         where several heads share a key: that stays as it is for the others

Scores that grow on and on let softmax look at one position only, and end in spikes of the loss, or in inf. A cap on the
scores themselves (tanh) lets what is below it grow; norms of queries and keys (qk_norm) can't be had where keys are
never made, as in latent attention with a cache. QK-clip changes no forward and no backward, and does nothing where
scores are small: Kimi K2's 15.5 trillion tokens had Muon, which lets them grow more than Adam does, and no spike; after
a while no head came near the threshold any more.

Of a head of latent attention the parts without a position are multiplied by √γ each, the queries' part with one by γ:
its key belongs to all heads. Optimizer states are left alone, and master copies follow as they follow whatever is set
between two steps; parameters of 16 bits are clipped to within their rounding. What is frozen stays as it is.

Each attention notes in training what its scores come to, in all forwards since the last step(): accumulated pieces, a
pipeline's micro-batches; not in evaluation, and not again what a checkpoint runs again. That is one product of queries
and keys more, some rows at a time; a ring sends its keys once more. The ranks that share a batch take the greatest of
all, one all-reduce of a number per head, and no rounding depends on who had which sample.
Source: Kimi Team 2025, "Kimi K2: open agentic intelligence", 2.1 and algorithm 1 (MuonClip).
"""

import math

import numpy as np

from .autodiff.primitive import lower
from .autodiff.writes import wrote
from .backend import module_of, number, to, to_device_of, xp
from .checkpoints.layout import chunks_of, layouts, named_arrays, piece_of
from .compress.low_precision import LowPrecisionLinear
from .nn.attention import MultiHeadAttention
from .nn.cross_attention import CrossAttention
from .nn.latent import LatentAttention
from .nn.layers import Linear
from .nn.linear_attention import LinearAttention
from .nn.module import Module
from .parallel.fsdp.fully_sharded import FullySharded
from .parallel.wrapping import check_not_annotated, sharing_a_batch


class Scores(dict):
    """{path of an attention: float64 (heads,), on the host: each head's greatest score; -inf where it had none}. Of
    the layers and heads that this rank has. Its text is a table.

    threshold  what they may come to
    clipped    [(path, head)] of those that were clipped
    """

    def __init__(self, found, threshold, clipped=()):
        super().__init__(found)
        self.threshold, self.clipped = threshold, list(clipped)

    @property
    def greatest(self):
        """Of all heads; -inf where there are none."""
        return max((float(scores.max()) for scores in self.values()), default=-math.inf)

    def __str__(self):
        width = max(map(len, ("attention", *self)))
        return "\n".join([f"{'attention':{width}}  greatest scores, by head; * clipped to {self.threshold:g}", *(
            f"{path:{width}}  " + " ".join(f"{score:8.2f}{'*' if (path, head) in self.clipped else ' '}"
                                          for head, score in enumerate(scores)) for path, scores in self.items())])


def factors(scores, threshold):
    """γ of each score: 1 where it isn't above the threshold, and where it is inf or NaN, which no weight mends."""
    above = np.isfinite(scores) & (scores > threshold)
    return np.where(above, threshold / np.where(above, scores, 1), 1.0)


class QKClip:
    """The clip above. From here on the model's attentions note their scores.

    model      a Module, or a list of a pipeline's chunks, in DistributedDataParallel or fully_shard, cut by
               parallelize_module, context_parallel or not at all. Attention by states has no scores, and is passed over
    threshold  τ, above 0: what scores may come to
    comm       the Communicator of the ranks whose samples, or parts of them, make one batch (default: a
               DistributedDataParallel's or fully_shard model's own, over which it sums gradients)

    ValueError for a model without scores, or with norms of queries and keys, which undo what is done to weights; where
    something else than a Linear makes queries and keys (an adapter, codes of few bits); for parameters that lie on a
    mesh; for a model in no wrapper, where there are several ranks and no comm is given.
    """

    def __init__(self, model, threshold=100.0, comm=None):
        self.threshold = number(threshold)
        if not 0 < self.threshold < math.inf:
            raise ValueError(f"QKClip: threshold={threshold!r}: a number above 0, say 100")
        self.model = model
        chunks, known = chunks_of(model), {name for name, _ in named_arrays(model)}
        for chunk in chunks:
            check_not_annotated(chunk, "QKClip", "scores are noted by ranks that have whole samples or heads")
        self.layers = {m: path for chunk in chunks for path, m in chunk.named_modules()
                       if isinstance(m, MultiHeadAttention) and not isinstance(m, LinearAttention)}
        if not chunks:
            raise ValueError("QKClip: a list of no chunks: a pipeline's rank has one at least")
        if not self.layers and isinstance(model, Module):
            raise ValueError(f"QKClip: the {type(model).__name__} has no MultiHeadAttention that makes scores")
        for m, path in self.layers.items():
            _check(path, m, known)
        comms = {sharing_a_batch(chunk, "QKClip") for chunk in chunks} if comm is None else {comm}
        if len(comms) > 1:
            raise ValueError("QKClip: the pipeline's chunks sum gradients over different ranks: give their comm")
        self.comm, = comms
        for m in self.layers:
            weight = lower(next(m.parameters()))
            m.greatest = module_of(weight).full(m.heads, -xp.inf, xp.promote_types(weight.dtype, xp.float32))

    def forget(self):
        """Forget what was noted, as of a step that is left out."""
        for m in self.layers:
            m.greatest[...] = -xp.inf

    def step(self):
        """Clip, and return the Scores; to be called after optimizer.step(). Collective: one all-reduce. MismatchError
        on all ranks if they have different layers, or thresholds. A GPU is waited for."""
        if not self.layers:
            return Scores({}, self.threshold)
        together, end = xp.concatenate([m.greatest for m in self.layers]), 0
        self.comm.all_reduce(together, "max", what=f"greatest scores of {len(self.layers)} attentions, "
                             f"{next(iter(self.layers.values()))} and so on, clipped to {self.threshold}")
        scores = to(together, "cpu").astype(np.float64)
        trained = {name for chunk in chunks_of(self.model) for name, p in chunk.named_parameters() if p.requires_grad}
        found, rows, clipped = {}, {}, []
        for m, path in self.layers.items():
            found[path] = scores[end:(end := end + m.heads)]
            gamma = factors(found[path], self.threshold)
            if (gamma < 1).any() and (of_layer := _rows(m, path, gamma)).keys() <= trained:
                rows |= of_layer
                clipped += [(path, int(head)) for head in np.flatnonzero(gamma < 1)]
        self._multiply(rows)
        self.forget()
        return Scores(found, self.threshold, clipped)

    def _multiply(self, rows):
        """rows: {name of a parameter: float64, what each row that this rank knows of is multiplied by}."""
        if not rows:
            return
        kinds = layouts(self.model)
        for name, p in ((name, p) for chunk in chunks_of(self.model) for name, p in chunk.named_parameters()):
            if name not in rows:
                continue
            part, shape = p.leaf.part, kinds[name].shape
            whole = np.ones(shape[0])
            whole[slice(None) if part is None else part.indices] = rows[name]
            for box, place in kinds[name].pieces:
                mine = piece_of(p.data, place)
                by = whole[slice(*box[0])] if len(box) == len(shape) else whole[np.arange(*box[0]) // math.prod(
                    shape[1:])]
                by = by.astype(xp.promote_types(mine.dtype, xp.float32)).reshape(-1, *(1,) * (mine.ndim - 1))
                mine[...] = (mine * to_device_of(by, mine)).astype(mine.dtype)
                wrote(mine, "QKClip.step")
        for chunk in chunks_of(self.model):
            if isinstance(chunk, FullySharded):
                chunk.stale = True      # stages 1 and 2: the other ranks haven't seen it


# ---------------------------------------------------------------- which rows make a head's queries and keys

def _queries(gamma, m):
    """What makes a head's queries and keys is multiplied by: (heads,), (kv_heads,)."""
    return (np.sqrt(gamma), np.sqrt(gamma)) if m.heads == m.kv_heads else (gamma, np.ones(m.kv_heads))


def _of_projections(m, gamma):
    q, k = _queries(gamma, m)
    return {"qkv": np.repeat(np.concatenate([q, k, np.ones(sum(m.parts[2:]))]), m.size)}


def _of_memory(m, gamma):
    q, k = _queries(gamma, m)
    return {"q": np.repeat(q, m.size), "kv": np.repeat(np.concatenate([k, np.ones(m.kv_heads)]), m.size)}


def _of_latents(m, gamma):
    root, one = np.sqrt(gamma), np.ones(m.heads)
    return {"q": np.repeat(np.stack([root, gamma], 1), [m.nope_size, m.rope_size], axis=1).reshape(-1),
            "kv": np.repeat(np.stack([root, one], 1), [m.nope_size, m.value_size], axis=1).reshape(-1)}


KINDS = {CrossAttention: _of_memory, LatentAttention: _of_latents, MultiHeadAttention: _of_projections}


def _makers(m, gamma):
    """{attribute of an attention: what each row of that Linear is multiplied by} for scores that are by gamma."""
    return next(of for kind, of in KINDS.items() if isinstance(m, kind))(m, gamma)


def _rows(m, path, gamma):
    """The same by names of parameters."""
    return {f"{path}.{name}.{kind}".lstrip("."): by for name, by in _makers(m, gamma).items()
            for kind in ("weight", "bias") if getattr(getattr(m, name), kind) is not None}


def _check(path, m, known):
    name = f"QKClip: {path or 'the model'}, of class {type(m).__name__},"
    if m.k_norm is not None:
        raise ValueError(f"{name} has norms of queries and keys, with which smaller weights change no score: leave "
                         "QKClip or qk_norm out")
    for maker in _makers(m, np.ones(m.heads)):
        linear = getattr(m, maker)
        if not isinstance(linear, (Linear, LowPrecisionLinear)) and not getattr(type(linear), "is_part", False):
            raise ValueError(f"{name} has a {type(linear).__name__} as its {maker}, whose rows aren't known: only a "
                             "Linear's can be clipped")
    if others := sorted(set(_rows(m, path, np.ones(m.heads))) - known):
        raise ValueError(f"{name} shares {', '.join(others)} with another layer, whose scores would change as well")
