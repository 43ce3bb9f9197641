"""Which part of an attention a rank has where its heads are divided (tensor_parallel.py).

    MultiHeadAttention    x ────────── copy_to ── qkv ──┬── attention ── out ── reduce_from
    LatentAttention       x ── down ─┬─ q_norm ── copy_to ── q ───┬─ attention ── out ── reduce_from
                                     ├─ kv_norm ─ copy_to ── kv ──┤
                                     └─ the turned key ─ copy_to ─┘
    LinearAttention       x ────────── copy_to ── project ──┬── states, gated ── out ── reduce_from
    CrossAttention        x ────────── copy_to ── q ────────┬── attention ── out ── reduce_from
                          memory ───── copy_to ── kv ───────┘

What makes heads is cut by columns, `out` by rows. Norms of queries, keys and results, which all heads share, are whole,
and the gradients of their weights summed. What makes latents stays whole, with its norms: its work is the same
on all ranks, and so are its gradients, behind the three sums over what the ranks' heads have made of latents and key:
q_rank + kv_rank + rope_size numbers per token, where qkv's are those of x. With sequence parallelism it has a rank's
part of the sequence, and latents are what is gathered.
"""

import copy
import functools
import itertools

import numpy as np

from ...data.loader import share
from ...nn.attention import MultiHeadAttention, Sinks
from ...nn.cross_attention import CrossAttention
from ...nn.decoding import by_position
from ...nn.latent import LatentAttention
from ...nn.linear_attention import Decay, LinearAttention
from ..collectives import copy_to
from ..positions import check_dropout, of_part
from . import sequence_parallel as sequences
from .tensor_parallel import ColumnParallelLinear, RowParallelLinear, _Part


def share_of_heads(attention, comm, **options):
    """The attention's attributes, cut by heads: every rank keeps its share of the queries' and of the keys'."""
    heads, kv_heads = attention.heads, attention.kv_heads
    if heads % comm.size or kv_heads % comm.size:
        raise ValueError(f"tensor parallel: {comm.size} ranks must divide the {heads} heads and {kv_heads} kv_heads of "
                         f"{type(attention).__name__}")
    parts = next(parts for kind, parts in KINDS.items() if isinstance(attention, kind))
    return {**parts(attention, comm, **options), **_dropout(attention, comm), "heads": heads // comm.size,
            "kv_heads": kv_heads // comm.size}


def _dropout(attention, comm):
    """What drops the weights of this rank's heads, as it does of all."""
    if attention.dropout is None:
        return {}
    check_dropout("parallelize_module", "an attention's dropout", attention.dropout)
    return {"dropout": of_part(copy.copy(attention.dropout), heads=(_features(comm, 1, attention.heads),
                                                                    attention.heads))}


def _features(comm, size, count, first=0):
    """Those of this rank's share of `count` heads of so many features each, behind the `first` heads."""
    lo, hi = share(count, comm.rank, comm.size)
    return np.arange((first + lo) * size, (first + hi) * size)


def _of_projections(attention, comm, **options):
    rows = [_features(comm, attention.size, count, end - count)
            for count, end in zip(attention.parts, itertools.accumulate(attention.parts), strict=True)]
    return {"qkv": ColumnParallelLinear(attention.qkv, comm, np.concatenate(rows), **options),
            **_norms(attention, comm),
            **({} if attention.sinks is None else {"sinks": SinksOfHeads(attention.sinks, comm)}),
            "out": RowParallelLinear(attention.out, comm, rows[0], **options)}


class SinksOfHeads(_Part):
    """Sinks of this rank's share of the heads."""

    def __init__(self, sinks, comm):
        self._take(sinks, comm, False, score=(0, _features(comm, 1, sinks.score.shape[0])))

    forward, extra_repr = Sinks.forward, Sinks.extra_repr


def _norms(attention, comm):
    return {name: NormOfHeads(norm, comm) for name in ("q_norm", "k_norm", "norm")
            if (norm := getattr(attention, name, None)) is not None}


def _of_states(attention, comm, **options):
    heads, size = attention.heads, attention.size
    rows = [_features(comm, size, heads, i * heads) for i in range(4)]      # of queries, keys, values, gates
    rows += [_features(comm, 1, heads, (4 * size + i) * heads) for i in range(attention.numbers)]
    return {"project": ColumnParallelLinear(attention.project, comm, np.concatenate(rows), **options),
            "decay": DecayOfHeads(attention.decay, comm), **_norms(attention, comm),
            "out": RowParallelLinear(attention.out, comm, rows[0], **options)}


class DecayOfHeads(_Part):
    """A Decay of this rank's share of the heads."""

    def __init__(self, decay, comm):
        self._take(decay, comm, False, bias=(0, _features(comm, 1, decay.bias.shape[0])))

    forward, extra_repr = Decay.forward, Decay.extra_repr


class NormOfHeads(sequences.SequenceParallel):
    """The norm of each head by itself, where a rank has some of the heads: the gradient of its weight is summed over
    the ranks. It adds nothing to its name."""

    @by_position
    def forward(self, x):
        return super().forward(x)


def _of_latents(attention, comm, sequence_parallel=False, **options):
    options |= {"sequence_parallel": sequence_parallel}
    queries, ups, values = (_features(comm, size, attention.heads) for size in (
        attention.size, attention.nope_size + attention.value_size, attention.value_size))
    parts = {"q": ColumnParallelLinear(attention.q, comm, queries, **options),
             "kv": ColumnParallelLinear(attention.kv, comm, ups, **options),
             "out": RowParallelLinear(attention.out, comm, values, **options),
             "to_heads": functools.partial(sequences.gather_sequence if sequence_parallel else copy_to, comm=comm)}
    between = ("down", "kv_norm", *["q_norm"] * (attention.q_rank is not None)) if sequence_parallel else ()
    return parts | {name: sequences.on_part(getattr(attention, name), comm) for name in between}


def _of_memory(attention, comm, **options):
    kv_heads, size = attention.kv_heads, attention.size
    queries = _features(comm, size, attention.heads)
    rows = np.concatenate([_features(comm, size, kv_heads, first) for first in (0, kv_heads)])
    return {"q": ColumnParallelLinear(attention.q, comm, queries, **options),
            "kv": ColumnParallelLinear(attention.kv, comm, rows, **options), **_norms(attention, comm),
            "out": RowParallelLinear(attention.out, comm, queries, **options)}


KINDS = {CrossAttention: _of_memory, LatentAttention: _of_latents, LinearAttention: _of_states,
         MultiHeadAttention: _of_projections}
