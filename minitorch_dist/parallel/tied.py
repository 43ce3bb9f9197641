"""Parameters that several stages of a pipeline have: an embedding, say, and the output layer that is tied to it.

    stage            0               1        2
    parameter        0.weight        –        9.weight         a copy each, of what is one tensor in one process
    backward leaves  g₀                       g₂
    run() ends with  g₀ + g₂                  g₀ + g₂           an all-reduce, of those ranks alone

Copies that begin alike and are stepped alike stay alike. What counts parameters once (norms, checkpoints) takes the
first. Sent are 2 (n - 1)/n times the gradient's bytes for n ranks, once a step; a copy costs what a parameter does. In
exact mode, where the order of all sums is that of one process, gradients travel micro-batch by micro-batch (Chains).
One that no stage has used has no gradient, as in one process. The sums say so themselves, without a further message:
UNUSED + UNUSED is UNUSED, and UNUSED + g is g.
Source: Megatron-LM, whose first and last stage share the word embeddings so.
"""

import copy
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..autodiff.primitive import lower
from ..autodiff.reverse import add_hook
from ..autodiff.tensor import Tensor
from ..autodiff.writes import wrote
from ..backend import device_of, module_of, to, xp, zeros
from ..nn.moe import MoE
from ..nn.norm import BatchNorm
from .wrapping import ReducingModule

UNUSED = -0.0       # in the place of a gradient. Those that there are have 0.0 added: no element of theirs is -0.0


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
    """The stages, each with tensors of its own: copies, marked as such, in place of what an earlier one has. ValueError
    where two have one module whose buffers move in training: nobody would bring their copies together."""
    first, found = {}, []       # id of a tensor: (its stage, its name, the tensor, which is so kept alive)
    _check_buffers(stages)
    for number, stage in enumerate(stages):
        again = {}
        for name, p in stage.named_parameters():
            owner, original, _ = first.setdefault(id(p), (number, name, p))
            if owner != number:
                again[name] = original
                mark(p, Tie(original, False))
        if again:
            stage = _with_copies(stage, again)
            mine = dict(stage.named_parameters())
            for name, original in again.items():
                mark(mine[name], Tie(original, True))
        found.append(stage)
    return found


def _check_buffers(stages):
    places = {}
    for number, stage in enumerate(stages):
        for name, m in stage.named_modules():
            if isinstance(m, BatchNorm) or isinstance(m, MoE) and m.load is not None:
                before, path = places.setdefault(id(m), (number, name))
                if before != number:
                    kind = type(m).__name__
                    moves = "running statistics" if isinstance(m, BatchNorm) else "experts' biases"
                    raise ValueError(f"stages {before} and {number} have one {kind}, {path} and {name}, and each would "
                                     f"move {moves} of its own: give each place a {kind} of its own, or cut the model "
                                     "so that one stage has both")


def _with_copies(stage, names):
    """The stage with copies of these parameters, and of the modules around them; the others are as they were."""
    copied = {id(p) for name, p in stage.named_parameters() if name in names}
    kept = [m for m in stage.modules() if copied.isdisjoint(map(id, m.parameters()))]
    kept += [p for p in stage.parameters() if id(p) not in copied] + list(stage.buffers())
    return copy.deepcopy(stage, {id(each): each for each in kept})


def mark(p, tie):
    """Give a parameter, or a piece of one, its Tie; it stays frozen or trained."""
    if p.leaf is None:      # frozen from its beginning
        p.requires_grad_().requires_grad_(False)
    p.leaf.tied = tie


class Ties:
    """The tied parameters of a pipeline's stages. Collective: ValueError on all ranks where those of one name differ.

    stages  {number: module} of this rank's
    exact   whether their gradients come together micro-batch by micro-batch (Chains), so that the first stage has all
    names   in the whole model
    places  {name: {number of a stage that has it: its rank}}
    sums    [([(a parameter of this rank's of a name, the wrapper of its stage, or None)], the Communicator of all ranks
            that have it, or None, and the place in it of the one with the first stage)]
    """

    def __init__(self, stages, comm, exact=False):
        mine, here = [], {}
        for number, stage in sorted(stages.items()):
            for p, whole in zip(stage.parameters(), _inside(stage).parameters(), strict=True):
                if (tie := tie_of(p)) is not None:      # of frozen ones nothing is summed: ZeRO 3 may cut one and not
                    kind = list(p.shape) if p.requires_grad else f"{list(whole.shape)}, frozen"     # the other
                    mine.append((tie.name, number, f"{p.dtype} {kind}"))
                    here.setdefault(tie.name, []).append((p, stage if isinstance(stage, ReducingModule) else None))
        kinds, places = {}, {}
        for rank, theirs in enumerate(comm.all_gather_object(mine)):
            for name, number, kind in theirs:
                kinds.setdefault(name, {})[number] = kind
                places.setdefault(name, {})[number] = rank
        kinds = {name: each for name, each in sorted(kinds.items()) if len(each) > 1}   # else a mark of an earlier cut
        for name, of_stages in kinds.items():
            if len({*of_stages.values()}) > 1:
                raise ValueError(f"Pipeline: {name} is tied, and not alike: " + "; ".join(
                    f"{kind} in stage {number}" for number, kind in sorted(of_stages.items())))
        self.names, self.exact, self.sums, groups, self.before = [*kinds], exact, [], {}, []
        self.places = {name: dict(sorted(places[name].items())) for name in self.names}
        self.trained = {name: not next(iter(each.values())).endswith("frozen") for name, each in kinds.items()}
        for name in self.names:
            group = sorted({*places[name].values()})
            if len(group) > 1 and tuple(group) not in groups:
                groups[tuple(group)] = comm.split(0 if comm.rank in group else None, name=f"{comm.name} tied")
            if name in here:
                first = group.index(next(iter(self.places[name].values())))
                self.sums.append((here[name], groups.get(tuple(group)), first))

    def check(self):
        """RuntimeError where one is trained that was frozen when the pipeline was made, or the other way round."""
        for params, *_ in self.sums:
            for p, _ in params:
                name = tie_of(p).name
                if p.requires_grad != self.trained[name]:
                    was, now = ("trained", "frozen") if self.trained[name] else ("frozen", "trained")
                    raise RuntimeError(f"Pipeline: {name}, which several stages have, was {was} when the Pipeline was "
                                       f"made, and is {now}: make the Pipeline anew, on all ranks")

    def begin(self):
        """Before a batch: keep apart what gradients there are, to which its own are added; copies, for the next ones
        may come to the same place. (A wrapper keeps its stage's: sums over ranks, to which nothing can be added, so
        that zero_grad() has been called; or what no_sync() adds up.)"""
        self.before = []
        for params, *_ in self.sums:
            self.before.append([None if wrapper is not None or p.grad is None else lower(p.grad).copy()
                                for p, wrapper in params])
            for p, wrapper in params:
                if wrapper is None:
                    p.grad = None

    def add_up(self):
        """When a batch's gradients are there: to all that share a parameter the sum of theirs, or none where none of
        them has used it; in exact mode, that of the first stage, which has it. Inside of no_sync() each wrapper adds up
        its own stage's, until the batch whose backward reduces them. Collective."""
        for (shared, comm, first), before in zip(self.sums, self.before, strict=True):
            params = [p for p, _ in shared]
            if not params[0].requires_grad or not all(wrapper is None or wrapper.sync for _, wrapper in shared):
                continue
            like = lower(params[0])
            there = [p.grad for p in (params[:1] if self.exact else params) if p.grad is not None]
            # A piece may be empty, and says by one element whether it is used, as the other ranks' pieces do.
            total = zeros(max(like.size, 1), xp.promote_types(like.dtype, xp.float32), device_of(like))
            total[...] = 0.0 if there else UNUSED
            for grad in there:
                total[:like.size] += lower(grad).reshape(-1)
            if comm is not None and self.exact:
                comm.broadcast(total, first)
            elif comm is not None:
                comm.all_reduce(total)
            if is_unused(total):
                for p, earlier in zip(params, before, strict=True):
                    p.grad = None if earlier is None else Tensor(earlier)
                continue
            total = total[:like.size].reshape(like.shape).astype(like.dtype, copy=False)
            for p, earlier in zip(params, before, strict=True):
                value = total if earlier is None else total + earlier
                if p.grad is None:
                    p.grad = Tensor(value.copy())
                else:
                    p.grad.data[...] = value
                    wrote(p.grad.data, "a pipeline's sum of tied gradients")
        self.before = []


class Chains:
    """Exact mode: a micro-batch's gradients of a tied parameter come together on the way from the last stage to the
    first, in the order in which one process adds them up.

        stage       0                   2               5
        backward    (g₅ + g₂) + g₀  ◂── g₅ + g₂    ◂── g₅         of micro-batch k, for each k

    (Of more than two uses it is that order where ops take the parameter itself, as layers do.)
    What the first stage has is the micro-batch's, as in one process: its wrapper adds these up along exact mode's tree.
    The others' wrappers add up parts, which the sum then replaces (Ties.add_up).

    ties    the pipeline's; stages: {number: module} of this rank's
    device  where its gradients are
    tag     from which on the tags of messages are free, in each direction
    """

    def __init__(self, ties, stages, comm, micro_batches, device, tag):
        self.comm, self.micro_batches, self.device, self.tag = comm, micro_batches, device, tag
        self.stages = 1 + max((stage for places in ties.places.values() for stage in places), default=0)
        # {stage: [(leaf, its number among the ties, (stage, rank) ahead of it, the same behind it)]}
        self.own = {stage: [] for stage in stages}
        for number, (name, places) in enumerate(ties.places.items()):
            chain = [None, *places.items(), None]
            for ahead, (stage, _), behind in zip(chain, chain[1:], chain[2:], strict=False):
                if stage in stages and ties.trained[name]:
                    leaf = next(p.leaf for p in _inside(stages[stage]).parameters() if name == name_of(p, None))
                    self.own[stage].append((leaf, number, ahead, behind))
        self.here, self.works = {}, []

    @contextmanager
    def backward(self, stage, k):
        """Around a stage's backward of micro-batch k, or W: [(leaf, what the stages behind have of its gradient)]. What
        it has when it is complete goes on to the stage ahead."""
        before, handles, posted = [], [], set()
        for leaf, number, ahead, behind in self.own[stage]:
            if behind is not None and not is_unused(arrived := self._take(leaf, number, stage, behind[1], k)):
                before.append((leaf, arrived))
            if ahead is not None:
                def on(ct, number=number, ahead=ahead):
                    posted.add(number)
                    ct = module_of(lower(ct)).array(lower(ct), order="C")
                    ct += ct.dtype.type(0)
                    self._post(ct, number, *ahead, k)
                handles.append(add_hook(leaf, on))
        try:
            yield before
        finally:
            for handle in handles:
                handle.remove()
        for leaf, number, ahead, _ in self.own[stage]:
            if ahead is not None and number not in posted:
                self._post(to(xp.full(leaf.shape, UNUSED, leaf.dtype), self.device), number, *ahead, k)

    def finish(self):
        """When all has been sent: wait until it has arrived."""
        for work in self.works:
            work.wait()
        self.works = []

    def _tag(self, number, stage, k):
        return self.tag + (number * self.stages + stage) * self.micro_batches + k

    def _post(self, array, number, stage, rank, k):
        if rank == self.comm.rank:
            self.here[number, stage, k] = array
            return
        self.works = [work for work in self.works if not work.is_completed()]
        self.works.append(self.comm.isend(array, rank, self._tag(number, stage, k)))

    def _take(self, leaf, number, stage, rank, k):
        if rank == self.comm.rank:
            return self.here.pop((number, stage, k))
        array = to(np.empty(leaf.shape, leaf.dtype), self.device)
        self.comm.recv(array, rank, self._tag(number, stage, k))
        return array


def is_unused(gradient):
    """Whether an array stands in the place of a gradient that there isn't; one element tells."""
    first = to(gradient.reshape(-1)[:1], "cpu")
    return bool(((first == 0) & np.signbit(first)).any())


def links(ties):
    """(stage, the next one behind it) of all Chains: the first one waits for the second one's weight gradients."""
    return sorted({pair for name, places in ties.places.items() if ties.trained[name] for pair in pairwise(places)})


def _inside(stage):
    """The module whose parameters backward leaves gradients on."""
    return stage.module if isinstance(stage, ReducingModule) else stage
