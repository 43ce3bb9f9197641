"""Sequences that go through a pipeline's stages in slices, one after another.

    pipeline = Pipeline([stage], mesh["pp"], one_forward_one_backward(4, 8, slices=4))

What a position looks at lies before it. So a stage can work on the first quarter of its sequences, hand it on, and go
on with the second one, whose queries look at the keys that the first has left behind. Backward goes the other way: what
the queries of later slices say of earlier keys waits for the backward of the slice that these are of.

    of one micro-batch           F0.0        F0.1        F0.2        B0.2        B0.1        B0.0
    keys and values              ■ · ·       ■ ■ ·       ■ ■ ■       ■ ■ ■       ■ ■ ·       ■ · ·
    queries                      ■           · ■         · · ■       · · ■       · ■         ■
    gradients of keys, values                                        + + ▣       + ▣         ▣        ▣: complete

Nothing is done twice, and as many bytes are sent as without. What it is for: bubbles are those of s times as many
micro-batches, and in 1F1B rank r of p holds the activations of p-r + s-1 slices, in place of p-r whole micro-batches
(schedules.py); besides, of each micro-batch that is under way, keys and values as one array each, and from its first
backward on their gradients. So long sequences, of which a batch has few, train in a pipeline that waits little.

Later slices have more keys to look at: of equal lengths they take longer, and the ranks wait for that. With
lengths_of_equal_work they get shorter instead.

A window's slices look back as far as it reaches; attention by states hands on the state; a chosen block may lie in any
slice. What mixes positions in another way, or counts them, is refused; so is what isn't causal.

Sources: Li et al. 2021, "TeraPipe: token-level pipeline parallelism for training large-scale language models" (all
forwards first, and lengths of equal work); Sun et al. 2024, "Seq1F1B: efficient sequence-level pipeline parallelism for
large language model training" (1F1B, and its memory).
"""

import math
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from ... import ledger
from ...autodiff import ops
from ...autodiff.ops.attention import ALL, band_of, banded_attention, greatest_in, part_of_band
from ...autodiff.ops.chosen_blocks import greatest_block_scores
from ...autodiff.primitive import LINEAR, LinearOp, Primitive, bind, lower, state
from ...backend import is_short, module_of, number, refuse_in_graph, whole, xp
from ...comm.together import together
from ...data.loader import share
from ...data.packing import apart
from ...nn.attention import MultiHeadAttention
from ...nn.cross_attention import CrossAttention
from ...nn.layers import Dropout
from ...nn.linear_attention import LinearAttention
from ...nn.moe import MoE
from ..context.context import MIXING
from ..positions import check_dropout, check_routing, of_part

WHAT = "Pipeline: sequences in slices, and {}, of class {}, "
KEEPS = "attention keeps what a slice of its sequences leaves for the next one"
NO_TANGENTS = "what a slice of a pipeline leaves for later ones has a gradient, and no tangent"


def equal_lengths(time, slices):
    """The lengths of so many slices of `time` positions, the first ones longer by one where they can't be equal."""
    return [hi - lo for lo, hi in (share(time, j, slices) for j in reversed(range(slices)))]


def lengths_of_equal_work(time, slices, ratio):
    """The lengths of so many slices of `time` positions that all take as long: a list of whole numbers.

    ratio   what a position costs by itself, as a number of keys that it looks at. Of a GPT's block 6 · dim: its
            matrices have 12 · dim² elements, of 2 FLOPs each; a key takes 2 · dim for its score, and 2 · dim for its
            value
    ValueError where some would have no positions.
    """
    time, slices = whole("time", time), whole("slices", slices)
    if slices < 1:
        raise ValueError(f"{slices} slices: a sequence comes in one or more")
    # The work of the first t positions is ratio · t + t²/2: where it is a share of all of it
    work = ratio * time + time ** 2 / 2
    bounds = [round(math.sqrt(ratio ** 2 + 2 * work * j / slices) - ratio) for j in range(slices + 1)]
    lengths = [hi - lo for lo, hi in zip(bounds, bounds[1:], strict=False)]
    if min(lengths) < 1:
        raise ValueError(f"{time} positions in {slices} slices of equal work: {lengths} of them; each must have one at "
                         "least: take fewer slices")
    return lengths


# ---------------------------------------------------------------- what slices leave for each other

class Growing:
    """Keys, or values, of all slices of a micro-batch, (batch, heads, time, size), of which the first are there.

    gradient   None, or what later slices have said of the earlier ones, in float32 at least
    owed       where slices begin of whose positions there is something in it
    """

    gradient = None

    def __init__(self, shape, like):
        self.array, self.owed = module_of(like).zeros(shape, like.dtype), set()

    @property
    def lost(self):
        """Whether a slice hasn't got what others have said of it."""
        return self.gradient is not None and bool(self.owed)

    def add(self, x, first, here):
        """The positions from `first` on, up to the end of a slice whose own are x's."""
        self.array[:, :, here] = x
        self.owed.add(here.start)
        found = self.array[:, :, first:here.stop]
        # Who packs what the tape saves (offload_activations) does so once for all views, and the rest is to come.
        return found if state.pack is None else found.copy()

    def settle(self, ct, first, here):
        """The gradient of x, where this one's queries have found ct, and those of later slices what is here."""
        if self.gradient is None:
            self.gradient = module_of(ct).zeros(self.array.shape, xp.float32 if is_short(ct.dtype) else ct.dtype)
            ledger.keep(self.gradient, "activation")
        self.gradient[:, :, first:here.stop] += ct
        self.owed = {start for start in self.owed if start < here.start}
        return self.gradient[:, :, here].astype(ct.dtype)      # a copy: a view would keep all of it


class Handed:
    """A state that one slice leaves for the next: the array; and what that says of it, None before it has."""

    state = gradient = None

    @property
    def lost(self):
        """Whether the slice hasn't got that."""
        return self.gradient is not None

    def settle(self):
        """Its gradient."""
        found, self.gradient = self.gradient, None
        return xp.zeros_like(self.state) if found is None else found


def _no_tangent(t, residual):
    raise TypeError(NO_TANGENTS)


def _hand_on(y, left, handed):
    handed.state = left
    return y


def _said(ct, residual):
    (shape, handed), ct = residual, lower(ct)
    handed.gradient = ct
    return module_of(ct).zeros(shape, ct.dtype)


_adding = LinearOp("with_earlier", _no_tangent, lambda c, r: r[0].settle(lower(c), *r[1:]))
_recalling = LinearOp("recalled", _no_tangent, _said)
_handing = LinearOp("handed_on", _no_tangent, lambda c, handed: handed.settle(), fresh=False)
_with_earlier = Primitive("with_earlier", lambda x, kept, first, here: kept.add(x, first, here),
                          params="kept first here", x=(_adding, "kept first here"))
# Nothing flows to x, which is here for the tape: what is said of the state is handed to the slice that has left it.
_recalled = Primitive("recalled", lambda x, shape, handed: handed.state, params="shape handed",
                      x=(_recalling, "shape handed"))
_handed_on = Primitive("handed_on", _hand_on, "y left", "handed", y=(LINEAR["same"], None), left=(_handing, "handed"))


# ---------------------------------------------------------------- who tells layers where they are

class Here:
    """Which positions of their sequences a stage's layers work on now, as layers ask their `context` (nn/attention.py).

    slices   the Slices of the rank
    """

    drops, watches = False, True

    def __init__(self, slices):
        self.slices = slices

    def length(self, time):
        """How long the sequences are."""
        return self.slices.bounds[-1]

    def positions(self, time):
        """int64 (time,): where this slice's positions stand. ValueError where there are others."""
        here = self.slices.here
        if time != here.stop - here.start:
            raise ValueError(f"Pipeline: a stage works on {time} positions, in a slice of {here.stop - here.start}: "
                             "its sequences can't come in slices")
        return np.arange(here.start, here.stop)

    def whole(self, documents):
        """The numbers of documents of whole sequences, (batch, time): all ranks of a pipeline have the batch."""
        return self.slices.documents()

    def __repr__(self):
        return f"slice {self.slices.slice} of {self.slices.count}"


class SlicedAttention(Here):
    """The same of one attention, which it is for all keys up to this slice.

    kept   {micro-batch: what its slices have left so far}
    """

    def __init__(self, slices):
        super().__init__(slices)
        self.kept = {}

    def __call__(self, q, k, v, causal, scale=None, documents=None, window=None, sinks=None, note=None):
        here, band = self.slices.here, band_of(causal, window)
        self.positions(k.shape[2])
        there = slice(0 if window is None else max(0, here.start - window + 1), here.stop)
        k, v = self._up_to_here(k, v, there.start)
        band = part_of_band(band, here, there) or ALL       # of no positions at all
        if documents is not None:
            documents = documents[:, here], documents[:, there]
        if note is not None:
            note(greatest_in(lower(q), lower(k), None, documents, band, number(scale)))
        return banded_attention(q, k, v, band, scale, documents=documents, sinks=sinks)

    def blocks(self, q, k, v, size, count, scale, note=None):
        """nn.BlockAttention's."""
        k, v = self._up_to_here(k, v, 0)
        if note is not None:
            note(greatest_block_scores(q, k, size, count, scale))
        return ops.block_attention(q, k, v, size, count, scale)

    def _up_to_here(self, k, v, first):
        """Keys and values of all slices so far, from position `first` on."""
        refuse_in_graph(KEEPS)
        if self.slices.micro_batch not in self.kept:
            self.kept[self.slices.micro_batch] = [
                Growing((*x.shape[:2], self.slices.bounds[-1], x.shape[3]), lower(x)) for x in (k, v)]
        return [bind(_with_earlier, (x,), (kept, first, self.slices.here))
                for x, kept in zip((k, v), self.kept[self.slices.micro_batch], strict=True)]

    def states(self, recurrence, parts, documents=None):
        """nn.LinearAttention's."""
        if documents is not None:
            raise ValueError("Pipeline: packed documents, whose states would go from slice to slice, and from one "
                             "document to another: leave the slices out, or train on rows of one document each")
        refuse_in_graph(KEEPS)
        self.positions(parts[0].shape[2])
        handed = self.kept.setdefault(self.slices.micro_batch, [Handed() for _ in range(self.slices.count)])
        k, j = parts[1], self.slices.slice
        before = bind(_recalled, (k,), (tuple(k.shape), handed[j - 1])) if j else None
        y, left = recurrence.read_on(*parts, before)
        return bind(_handed_on, (y, left), (handed[j],))

    def forget(self, micro_batch):
        """What a micro-batch has left. RuntimeError where a slice hasn't got its gradient."""
        if any(kept.lost for kept in self.kept.pop(micro_batch, ())):
            raise RuntimeError("Pipeline: the loss of a slice doesn't depend on what its stage makes, and what later "
                               "slices say of its keys is lost: let each slice's loss depend on its output, with a "
                               "factor of 0 where it doesn't count")


class Slices:
    """Where a rank's stages are in their batch, piece after piece, and what is kept there of earlier slices. A piece is
    one slice of one micro-batch; they are counted in the order of forwards.

    chunks    the rank's
    count     slices of each micro-batch
    lengths   their numbers of positions; None: equal, or the first ones longer by one
    """

    def __init__(self, chunks, count, lengths=None):
        self.count, self.lengths = count, None if lengths is None else [whole("length", n) for n in lengths]
        self.places = Here(self)
        self.of_chunk = [{m: SlicedAttention(self) for m in chunk.modules() if isinstance(m, MultiHeadAttention)}
                         for chunk in chunks]
        self.chunks, self.shards, self.bounds = chunks, [], [0]
        self.micro_batch = self.slice = 0
        if self.lengths is not None and (len(self.lengths) != count or min(self.lengths) < 1):
            raise ValueError(f"Pipeline: lengths {lengths} of the slices, of which the schedule has {count}: a whole "
                             "number of positions for each, 1 or more")

    def cut(self, shards):
        """All micro-batches' slices, as Shards. ValueError where inputs and labels have no positions to be cut."""
        inputs, labels = shards[0].inputs.shape, shards[0].labels.shape
        if len(inputs) < 2 or inputs[1:2] != labels[1:2]:
            raise ValueError(f"Pipeline: inputs {tuple(inputs)} and labels {tuple(labels)} in {self.count} slices: "
                             "both must be (batch, time, …), a label for each position")
        time, lengths = inputs[1], self.lengths
        if lengths is None:
            lengths = equal_lengths(time, self.count)
        if sum(lengths) != time or min(lengths) < 1:
            raise ValueError(f"Pipeline: sequences of {time} positions, in {self.count} slices of "
                             f"{', '.join(map(str, lengths))}: they must add up, and none may be empty")
        self.shards, self.bounds = shards, [0, *np.cumsum(lengths).tolist()]
        self._forget_all()
        return [replace(shard, inputs=shard.inputs[:, lo:hi], labels=shard.labels[:, lo:hi])
                for shard in shards for lo, hi in zip(self.bounds, self.bounds[1:], strict=False)]

    def at(self, piece):
        """This piece is next."""
        self.micro_batch, self.slice = divmod(piece, self.count)

    @property
    def here(self):
        """The slice of the sequences that is worked on."""
        return slice(*self.bounds[self.slice:self.slice + 2])

    def documents(self):
        """Of the micro-batch that is worked on, packed rows."""
        return apart(self.shards[self.micro_batch].inputs)[1]

    def through(self, chunk, piece):
        """A piece's backward has gone through a chunk: behind a micro-batch's first one nobody needs what was kept."""
        if piece % self.count == 0:
            self._forget(chunk, piece)

    def read(self, chunk, piece):
        """The same where there is no backward: behind a micro-batch's last piece."""
        if (piece + 1) % self.count == 0:
            self._forget(chunk, piece)

    def _forget(self, chunk, piece):
        for attention in self.of_chunk[chunk].values():
            attention.forget(piece // self.count)

    def _forget_all(self):
        for attentions in self.of_chunk:
            for attention in attentions.values():
                attention.kept.clear()

    @contextmanager
    def told(self):
        """Inside, the chunks' layers know that they work on slices; outside, they are as they were."""
        before = []
        for chunk, attentions in zip(self.chunks, self.of_chunk, strict=True):
            for m in chunk.modules():
                if isinstance(m, Dropout) or hasattr(m, "context"):
                    before.append((m, type(m), "context" in vars(m)))
                    if isinstance(m, Dropout):
                        of_part(m, context=self.places)
                    else:
                        object.__setattr__(m, "context", attentions.get(m, self.places))
        try:
            yield
        finally:
            for m, kind, had in before:
                m.__class__ = kind      # a Dropout was of a part
                if had:
                    object.__setattr__(m, "context", None)      # as check_slices has found it
                else:
                    object.__delattr__(m, "context")
            self._forget_all()


def check_slices(chunks, comm, exact):
    """ValueError, on all ranks, if some rank's chunks can't work on slices of their sequences. Collective."""
    def check():
        if exact:
            raise ValueError("Pipeline: sequences in slices, in exact mode: sums over positions are inside of "
                             "products, which one process adds up in another order: leave one of both out")
        for chunk in chunks:
            for path, module in chunk.named_modules():
                _check(path or "a stage", module)
    together(comm, check)


def _check(path, module):
    what = WHAT.format(path, type(module).__name__)
    check_dropout("Pipeline", path, module)
    if isinstance(module, (*MIXING, CrossAttention)):
        raise ValueError(f"{what}looks at several positions at once, or counts them: leave the slices out")
    if isinstance(module, MoE):
        check_routing(what.rstrip(", "), module, "leave the slices out")
        if module.balance:
            raise ValueError(f"{what}has balance={module.balance}, a product of means over all positions, of which a "
                             "slice has some: balance it by biases, or leave the slices out")
    if getattr(module, "context", None) is not None:
        raise ValueError(f"{what}has a part of each sequence already ({module.context}): leave the slices out, or "
                         "context_parallel")
    if isinstance(module, MultiHeadAttention) and not isinstance(module, LinearAttention):
        if not module.causal:
            raise ValueError(f"{what}isn't causal: its first slice would look at the last one: leave the slices out")
        if module.dropout is not None:
            raise ValueError(f"{what}drops weights with probability {module.dropout.p}, of which a slice has some: "
                             "leave this out, or the slices")
