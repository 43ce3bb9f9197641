"""Context parallelism: the ranks of a group hold parts of each sequence, for sequences that are too long for one.

    tokens (batch, T) ── cut_sequence ── (batch, T/N) ── embedding ── norm ─┬─ attention ─┬─ MLP ── … ── loss
                                                            this rank's     └─ the others' keys

Everything in a transformer but attention works on each position by itself: with all parameters on each rank, a rank
does 1/N of the work and keeps 1/N of the activations. Attention asks the others, in one of two ways:

    "ring"         keys and values go round, queries stay (ring_attention.py). Any number of ranks; while one product is
                   made the next keys are on their way, and no scores are kept
    "all_to_all"   for a while each rank has whole sequences of heads/N heads instead of a part of all heads: at most as
                   many ranks as key and value heads, and attention itself is what it was

                   elements sent per rank, forward                                    backward
    "ring"         (N - 1) · 2 · batch · T/N · kv_dim                                 twice as many
    "all_to_all"   (N - 1)/N · 2 · batch · T/N · (dim + kv_dim)                       as many

Each rank has tokens of its own, so gradients are summed over these ranks as over those that divide the samples:

    mesh = comm.DeviceMesh(dp=-1, cp=4)
    gpt = context_parallel(nn.GPT(vocabulary, length), mesh["cp"])              # alike on all ranks
    model = DistributedDataParallel(gpt, mesh["dp", "cp"])                      # or fully_shard
    for batch in data.Loader(…, rank=mesh.coords["dp"], size=mesh["dp"].size).epoch(0):
        part = cut_sequence(batch, mesh["cp"])                                  # batch.count stays the samples'
        training.train_step(model, optimizer, part, loss_sum, mesh["dp", "cp"], seed=0, step=step, units=T)

Sources: see ring_attention.py; Jacobs et al. 2023, "DeepSpeed Ulysses" (all_to_all).
"""

import math
from dataclasses import is_dataclass, replace

from ...autodiff import ops
from ...autodiff.ops.attention import band_of, greatest_scores, numbered
from ...autodiff.ops.chosen_blocks import greatest_block_scores
from ...autodiff.ops.shape import inverse
from ...autodiff.primitive import lower
from ...backend import to_device_of
from ...comm.mesh import check_no_mesh
from ...nn.attention import MultiHeadAttention
from ...nn.block_attention import BlockAttention
from ...nn.conv import Conv1d, Conv2d, MaxPool2d
from ...nn.cross_attention import CrossAttention
from ...nn.layers import Dropout, Flatten
from ...nn.linear_attention import LinearAttention
from ...nn.models import ImageTransformer
from ...nn.module import Module
from ...nn.moe import MoE
from ...nn.multi_token import MultiTokenPrediction
from ...nn.norm import BatchNorm
from ..collectives import all_gather, all_to_all
from ..positions import check_dropout, check_routing, of_part, shared_by
from ..wrapping import check_not_annotated, check_summed
from .linear_context import attention
from .ring_attention import TIME, check_parts, chunks, positions, ring_attention, settings

# What mixes positions, or counts them, in a way of its own: it would take a part for the whole.
MIXING = (BatchNorm, Conv1d, Conv2d, Flatten, ImageTransformer, MaxPool2d, MultiTokenPrediction)


# ---------------------------------------------------------------- parts of sequences

def cut_sequence(batch, comm, layout="zigzag", axis=1):
    """This rank's positions, in their order, of sequences that are the same on all ranks of comm.

    batch   an array or Tensor (batch, time, …), or a Batch or Shard of a Loader, whose inputs and labels are cut then
    layout  as context_parallel was told
    axis    of time
    ValueError where the ranks can't have equal parts.
    """
    if is_dataclass(batch):
        parts = {name: cut_sequence(getattr(batch, name), comm, layout, axis) for name in ("inputs", "labels")}
        if hasattr(batch, "shards"):
            parts["shards"] = [cut_sequence(shard, comm, layout, axis) for shard in batch.shards]
        return replace(batch, **parts)
    n = len(batch.shape)
    if not -n <= axis < n:
        raise ValueError(f"cut_sequence: shape {tuple(batch.shape)} has no axis {axis}; sequences are (batch, time, …)")
    time, unit = batch.shape[axis], len(chunks(0, comm.size, layout)) * comm.size
    if time % unit:
        shorter = f", or cut them to {time - time % unit}" if time > unit else ""
        raise ValueError(f"cut_sequence: {comm.size} ranks can't share {time} positions in layout={layout!r}, which "
                         f"needs a multiple of {unit}: pad the sequences to {time + unit - time % unit}{shorter}")
    here = to_device_of(positions(time // comm.size, comm.rank, comm.size, layout), lower(batch))
    return batch[(slice(None),) * (axis % n) + (here,)]


def join_sequence(x, comm, layout="zigzag", axis=1):
    """All ranks' parts as whole sequences, in the order of positions, on every rank: what undoes cut_sequence.
    Collective; differentiable: the loss is then the sum over the ranks."""
    return _in_order(all_gather(x, comm, axis), comm.size, layout, axis)


def _in_order(x, ranks, layout, axis, back=False):
    """All ranks' parts, one after the other along `axis`, in the order of positions; back: the other way."""
    order = [chunk for rank in range(ranks) for chunk in chunks(rank, ranks, layout)]
    if order == sorted(order):
        return x
    pieces = ops.split(x, len(order), axis)
    return ops.concatenate([pieces[i] for i in (order if back else inverse(order))], axis)


# ---------------------------------------------------------------- attention by heads

def ulysses_attention(query, key, value, comm, causal=False, layout="zigzag", scale=None, documents=None,
                      window=None, dropped=None, sinks=None, note=None):
    """ring_attention's arguments and result, by four all-to-alls: of query, key, value, and of the result.

    dropped    None, or what drops weights of a rank's share of the heads, (batch, heads/N, time, time)
    note       None, or who is told the greatest score of each head, (heads,); -inf of those of other ranks
    sinks      None, or all heads' (heads,), as of scaled_dot_product_attention
    ValueError unless the ranks can share heads and kv_heads equally. Backward keeps what attention of whole sequences
    keeps, of heads/N heads. Collective.
    """
    check_parts("ulysses_attention", query, key, value)
    check_heads("ulysses_attention", query.shape[1], key.shape[1], comm)
    positions(query.shape[TIME], comm.rank, comm.size, layout)
    if documents is not None:
        documents = numbered(documents, (query.shape[0], comm.size * query.shape[TIME]))
    heads = query.shape[1] // comm.size
    sinks = sinks if sinks is None else sinks[comm.rank * heads:(comm.rank + 1) * heads]

    def attend(q, k, v):
        return ops.scaled_dot_product_attention(q, k, v, dropout_p=dropped or 0.0, is_causal=causal, scale=scale,
                                                documents=documents, window=window, sinks=sinks)

    def greatest(q, k):
        return greatest_scores(q, k, None, causal, scale, documents, window)
    return _by_heads(attend, greatest, (query, key, value), comm, layout, note,
                     settings(band_of(causal, window), scale, layout, documents))


def check_heads(name, heads, kv_heads, comm):
    """ValueError unless each rank can have as many heads."""
    if heads % comm.size or kv_heads % comm.size:
        raise ValueError(f"{name}: {comm.size} ranks must divide the {heads} heads and the {kv_heads} kv_heads; a ring "
                         "doesn't ask for that")


def _by_heads(attend, greatest, parts, comm, layout, note, what):
    """attend(q, k, v) of whole sequences of this rank's share of the heads, as this rank's positions of all heads.
    note: None, or who is told greatest(q, k), each head's; what: in words, what must be the same on all ranks."""
    q, k, v = (_part_of_heads(x, comm, layout, what) for x in parts)
    if note is not None:
        note(_among_all(greatest(q, k), comm))
    return _part_of_time(attend(q, k, v), comm, layout, what)


def _among_all(scores, comm):
    """Numbers of this rank's heads among those of all, -inf of the others'."""
    here = len(scores)
    return ops.pad(scores, (comm.rank * here, (comm.size - 1 - comm.rank) * here), constant_values=-math.inf)


def _part_of_heads(x, comm, layout, what):
    """(batch, heads, time/N, size) -> (batch, heads/N, time, size)."""
    batch, heads, time, size = x.shape
    n = comm.size
    x = ops.transpose(ops.reshape(x, (batch, n, heads // n, time, size)), (1, 0, 2, 3, 4))
    x = ops.transpose(all_to_all(x, comm, what=what), (1, 2, 0, 3, 4))
    return _in_order(ops.reshape(x, (batch, heads // n, n * time, size)), n, layout, TIME)


def _part_of_time(x, comm, layout, what):
    """(batch, heads/N, time, size) -> (batch, heads, time/N, size)."""
    batch, heads, time, size = x.shape
    n = comm.size
    x = _in_order(x, n, layout, TIME, back=True)
    x = ops.transpose(ops.reshape(x, (batch, heads, n, time // n, size)), (2, 0, 1, 3, 4))
    x = ops.transpose(all_to_all(x, comm, what=what), (1, 0, 2, 3, 4))
    return ops.reshape(x, (batch, n * heads, time // n, size))


HOW = {"ring": ring_attention, "all_to_all": ulysses_attention}


# ---------------------------------------------------------------- whole models

class Context(Module):
    """What a model of this rank's part of the sequences is told: which positions these are, and how to attend.

    divided_over    the Communicator whose ranks share the sequences: DistributedDataParallel and fully_shard ask for it
    summed          whether somebody sums the gradients over them: these two set it, and whoever does it otherwise has
                    to. They sum those of the modules that they were given: give them the whole model, or a whole stage.
                    Only a model in training asks: in evaluation a gradient is this rank's part of it

    It has no parameters. Called (q, k, v, causal, scale, documents, window), and by name what MultiHeadAttention takes
    besides, it is attention of this rank's queries to
    all ranks' keys; documents are those of the whole sequences, which `whole` makes of this rank's.
    """

    def __init__(self, comm, how="ring", layout="zigzag"):
        super().__init__()
        if how not in HOW:
            raise ValueError(f"context_parallel: how={how!r} must be one of {', '.join(map(repr, HOW))}")
        chunks(comm.rank, comm.size, layout)
        self.comm, self.how, self.layout = comm, how, layout
        self.divided_over, self.summed = comm, False

    watches = True
    _name = property(lambda self: "", lambda self, name: None)     # what is drawn inside has its attention's path

    @property
    def drops(self):
        """Whether attention's weights can be dropped."""
        return self.how == "all_to_all"

    def length(self, time):
        """How long the sequences are of which each rank has so many positions."""
        return self.comm.size * time

    def positions(self, time):
        """int64 (time,): where this rank's positions stand in the sequence."""
        return positions(time, self.comm.rank, self.comm.size, self.layout)

    def whole(self, documents):
        """All ranks' numbers of documents, (batch, time/N) each, as those of whole sequences. Collective."""
        return lower(join_sequence(documents, self.comm, self.layout))

    def forward(self, q, k, v, causal, scale=None, documents=None, window=None, **more):
        y = HOW[self.how](q, k, v, self.comm, causal, self.layout, scale, documents, window, **more)
        check_summed(self, y)
        return y

    def blocks(self, q, k, v, size, count, scale, note=None):
        """nn.BlockAttention's, of this rank's positions, by whole sequences of its share of the heads; note: as
        ulysses_attention's."""
        y = _by_heads(lambda q, k, v: ops.block_attention(q, k, v, size, count, scale),
                      lambda q, k: greatest_block_scores(q, k, size, count, scale), (q, k, v), self.comm, self.layout,
                      note, f"{count} blocks of {size}, scale={scale}, {self.layout}")
        check_summed(self, y)
        return y

    def states(self, recurrence, parts, documents=None):
        """nn.LinearAttention's, of this rank's positions: states of all ranks, however other blocks attend."""
        y = attention(recurrence, parts, self.comm, self.layout, documents)
        check_summed(self, y)
        return y

    def __reduce_ex__(self, protocol):
        raise TypeError("a model whose sequences are divided over ranks can't be copied or pickled: build one that "
                        "isn't, and load the state_dict of this one")

    def extra_repr(self):
        return f"{self.how!r}, {self.layout!r}, rank {self.comm.rank} of {self.comm.size}"


def context_parallel(model, comm, how="ring", layout="zigzag"):
    """Let a model work on this rank's part of each sequence, (batch, time/N, …), in place; returns it.

    model   the same on all ranks of comm: a whole GPT, TransformerBlocks, or a Module of MultiHeadAttention that
            otherwise works on each position by itself. A GPT knows its positions then; a module with a table of its
            own, in whose class `context = None` stands, finds a Context there, and asks it for positions(time)
    how     "ring" or "all_to_all"
    layout  "zigzag" balances a causal ring, "contiguous" one of windows (ring_attention.py); cut_sequence must be told
            the same

    Names and state_dicts stay as they are: load one into a model that isn't divided in order to generate. Divide a
    model before an optimizer or DistributedDataParallel is made. It goes with parallelize_module of the same model over
    other ranks, before or after, whose sequence_parallel then divides each rank's part once more, and with pipelines;
    not with exact mode, nor with mixtures of experts that have a capacity: ValueError.
    """
    check_no_mesh("context_parallel", comm, "share the sequences", "cp")
    check_not_annotated(model, "context_parallel", "leave one out; annotated, the batch can be cut along time, as in "
                        f"annotate.split(x, 1, mesh[{comm.name!r}])")
    context = Context(comm, how, layout)
    context.training = model.training
    modules = dict(model.named_modules())
    attentions = [m for m in modules.values() if isinstance(m, MultiHeadAttention)]
    if not attentions:
        raise ValueError(f"context_parallel: the {type(model).__name__} has no MultiHeadAttention, whose keys would be "
                         "shared: cut the samples instead")
    for path, m in modules.items():
        _check(path or "the model", m, context)
    for path, m in modules.items():
        check_dropout("context_parallel", path, m)
    of_weights = {id(m.dropout) for m in attentions}        # of whole sequences of a rank's heads, in all_to_all
    for m in modules.values():
        if isinstance(m, MoE):
            shared_by(m, context=comm)
        if isinstance(m, Dropout):
            of_part(m, **({"over": comm} if id(m) in of_weights else {"context": context}))
        elif hasattr(type(m), "context"):
            m.context = context
    return model


def _check(path, module, context):
    if isinstance(module, MIXING):
        raise ValueError(f"context_parallel: {path}, of class {type(module).__name__}, looks at several positions at "
                         "once, or counts them, and would take this rank's for all")
    if isinstance(module, MoE):
        check_routing(f"context_parallel: {path}, of class MoE: ranks of {context.comm.name!r} share its sequences",
                      module, "divide the samples over these ranks instead")
    if isinstance(module, CrossAttention):
        raise ValueError(f"context_parallel: {path}, of class CrossAttention, looks at another sequence, of which it "
                         "isn't known whether a rank has all or a part: cut the samples or the heads instead")
    if isinstance(module, MultiHeadAttention) and context.how == "ring":
        if module.dropout is not None:
            raise ValueError(f"context_parallel: {path} drops weights with probability {module.dropout.p}, and a ring "
                             "has none that could be dropped: take how='all_to_all', or leave attention's dropout out")
        if module.sinks is not None:
            raise ValueError(f"context_parallel: {path} has sinks, which a ring would count once per rank: take "
                             "how='all_to_all', or leave them out")
        if isinstance(module, BlockAttention):
            raise ValueError(f"context_parallel: {path} chooses among all blocks of keys, of which a ring has a few "
                             "at a time: take how='all_to_all'")
    if isinstance(module, Context):
        raise ValueError(f"context_parallel: the sequences are divided already, {module.extra_repr()}")
    shared = isinstance(module, MultiHeadAttention) and not isinstance(module, LinearAttention)
    if context.how == "all_to_all" and shared:
        check_heads(f"context_parallel: {path}", module.heads, module.kv_heads, context.comm)
