"""Parameters that several stages of a pipeline have: an embedding, say, and the output layer that is tied to it.

    stage            0               1        2
    parameter        0.weight        –        9.weight         a copy each, of what is one tensor in one process
    backward leaves  g₀                       g₂
    run() ends with  g₀ + g₂                  g₀ + g₂           an all-reduce, of those ranks alone

Copies that begin alike and are stepped alike stay alike. What counts parameters once (norms, checkpoints) takes the
first. Sent are 2 (n - 1)/n times the gradient's bytes for n ranks, once a step; a copy costs what a parameter does.
Source: Megatron-LM, whose first and last stage share the word embeddings so.
"""

import copy
from typing import NamedTuple

from ..autodiff.primitive import lower
from ..autodiff.tensor import Tensor
from ..autodiff.writes import wrote
from ..backend import xp, zeros_like
from .wrapping import ReducingModule


class Tie(NamedTuple):
    """What a leaf knows of it: its name in the whole model, where it comes first, and whether this is a later copy."""

    name: str
    copied: bool


def tie_of(p):
    """A parameter's Tie; None for others."""
    return p.leaf.tied if p.leaf is not None else None


def name_of(p, name):
    """A parameter's name in the whole model, of that in its stage."""
    tie = tie_of(p)
    return name if tie is None else tie.name


def is_copy(p):
    """Whether an earlier stage has the same parameter."""
    tie = tie_of(p)
    return tie is not None and tie.copied


def apart(stages):
    """The stages, each with tensors of its own: copies, marked as such, in place of what an earlier one has."""
    first, found = {}, []       # id of a tensor: (its stage, its name, the tensor, which is so kept alive)
    for number, stage in enumerate(stages):
        again = {}
        for name, p in stage.named_parameters():
            owner, original, _ = first.setdefault(id(p), (number, name, p))
            if owner != number:
                again[name] = original
                _mark(p, Tie(original, False))
        if again:
            stage = _with_copies(stage, again)
            mine = dict(stage.named_parameters())
            for name, original in again.items():
                _mark(mine[name], Tie(original, True))
        found.append(stage)
    return found


def _with_copies(stage, names):
    """The stage with copies of these parameters, and of the modules around them; the others are as they were."""
    copied = {id(p) for name, p in stage.named_parameters() if name in names}
    kept = [m for m in stage.modules() if copied.isdisjoint(map(id, m.parameters()))]
    kept += [p for p in stage.parameters() if id(p) not in copied] + list(stage.buffers())
    return copy.deepcopy(stage, {id(each): each for each in kept})


def _mark(p, tie):
    if p.leaf is None:      # frozen from its beginning
        p.requires_grad_().requires_grad_(False)
    p.leaf.tied = tie


class Ties:
    """The tied parameters of a pipeline's stages. Collective: ValueError on all ranks where those of one name differ.

    stages  {number: module} of this rank's
    names   in the whole model
    sums    [(this rank's parameters of a name, the Communicator of all ranks that have it, or None)]
    """

    def __init__(self, stages, comm):
        mine, here = [], {}
        for number, stage in sorted(stages.items()):
            for p in stage.parameters():
                if (tie := tie_of(p)) is not None:
                    mine.append((tie.name, number, f"{p.dtype} {list(p.shape)}{', frozen' * (not p.requires_grad)}"))
                    here.setdefault(tie.name, []).append((p, isinstance(stage, ReducingModule)))
        kinds, ranks = {}, {}
        for rank, theirs in enumerate(comm.all_gather_object(mine)):
            for name, number, kind in theirs:
                kinds.setdefault(name, {})[number] = kind
                ranks.setdefault(name, {})[rank] = None
        kinds = {name: each for name, each in sorted(kinds.items()) if len(each) > 1}   # else a mark of an earlier cut
        for name, of_stages in kinds.items():
            if len({*of_stages.values()}) > 1:
                raise ValueError(f"Pipeline: {name} is tied, and not alike: " + "; ".join(
                    f"{kind} in stage {number}" for number, kind in sorted(of_stages.items())))
        self.names, self.sums, groups, self.before = [*kinds], [], {}, []
        self.trained = {name: not next(iter(each.values())).endswith("frozen") for name, each in kinds.items()}
        for name in self.names:
            group = tuple(ranks[name])
            if len(group) > 1 and group not in groups:
                groups[group] = comm.split(0 if comm.rank in group else None, name=f"{comm.name} tied")
            if name in here:
                self.sums.append((here[name], groups.get(group)))

    def check(self):
        """RuntimeError where one is trained that was frozen when the pipeline was made, or the other way round."""
        for params, _ in self.sums:
            for p, _ in params:
                name = tie_of(p).name
                if p.requires_grad != self.trained[name]:
                    was, now = ("trained", "frozen") if self.trained[name] else ("frozen", "trained")
                    raise RuntimeError(f"Pipeline: {name}, which several stages have, was {was} when the Pipeline was "
                                       f"made, and is {now}: make the Pipeline anew, on all ranks")

    def begin(self):
        """Before a batch: keep apart what gradients there are, to which its own are added. (Those of a wrapped stage
        are sums over ranks, to which nothing can be added: zero_grad() has been called.)"""
        self.before = []
        for params, _ in self.sums:
            self.before.append([None if wrapped else p.grad for p, wrapped in params])
            for p, wrapped in params:
                if not wrapped:
                    p.grad = None

    def add_up(self):
        """When a batch's gradients are there: to all that share a parameter the sum of theirs. Collective."""
        for (params, comm), before in zip(self.sums, self.before, strict=True):
            params = [p for p, _ in params]
            if not params[0].requires_grad:
                continue
            first = lower(params[0])
            total = zeros_like(first, dtype=xp.promote_types(first.dtype, xp.float32))
            for p in params:
                if p.grad is not None:
                    total += lower(p.grad)
            if comm is not None:
                comm.all_reduce(total)
            total = total.astype(first.dtype, copy=False)
            for p, earlier in zip(params, before, strict=True):
                value = total if earlier is None else total + lower(earlier)
                if p.grad is None:
                    p.grad = Tensor(value.copy())
                else:
                    p.grad.data[...] = value
                    wrote(p.grad.data, "a pipeline's sum of tied gradients")
        self.before = []
