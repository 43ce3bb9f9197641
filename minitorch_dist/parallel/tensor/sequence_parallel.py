"""Sequence parallelism: what lies between a model's tensor-parallel parts is cut along the sequence.

    tensor parallel      x  ── norm ── copy_to ──── A_r … B_r ── reduce_from ──── dropout ── +     x: alike on all ranks
    sequence parallel    x_r ─ norm ── all-gather ─ A_r … B_r ── reduce-scatter ─ dropout ── +     x_r: the r-th of x

Norms, dropouts and residual sums work on each position by itself, so that a rank does 1/t of that work and keeps 1/t of
those activations. What is sent are the same bytes, for a ring's all-reduce is a reduce-scatter and an all-gather:

                          forward          backward
    copy_to               –                all-reduce
    reduce_from           all-reduce       –
    gather_sequence       all-gather       reduce-scatter
    reduce_scatter_…      reduce-scatter   all-gather

The parameters between are still the same on all ranks, but each rank sees its positions alone: they go in through
copy_to, whose transpose sums their gradients over the ranks. Sequences are (batch, time, dim), cut along time. A
mixture of experts routes whole sequences: they are gathered before it, and the ranks all do the same work there; or, if
these ranks share the experts too, each routes its own positions (mixtures.py).
Where context_parallel divides the sequences over other ranks, "whole" is a rank's part of them (parallel/positions.py).
Source: Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models".
"""

import math
from contextlib import contextmanager
from typing import NamedTuple

from ...autodiff import ops
from ...autodiff.modes import saved_tensors_hooks
from ...autodiff.primitive import lower, state
from ...autodiff.writes import log, tick
from ...nn.attention import MultiHeadAttention
from ...nn.containers import Sequential
from ...nn.cross_attention import CrossAttention
from ...nn.layers import GELU, Dropout, LeakyReLU, ReLU, Sigmoid, SwiGLU, Tanh
from ...nn.module import Module
from ...nn.moe import MoE
from ...nn.multi_token import MultiTokenPrediction
from ...nn.norm import BatchNorm
from ...nn.transformer import GPT, Embedding, FeedForward, TransformerBlock
from ..collectives import all_gather, copy_to, reduce_scatter, scatter_to
from ..context.context import Context
from ..positions import TIME, check_axes, check_dropout, check_length, is_known, of_part

CHOICES = (False, True, "regather")     # what sequence_parallel= may be; see parallelize_module


def gather_sequence(x, comm):
    """All ranks' parts of a sequence, (batch, time/t, dim) -> (batch, time, dim), for each rank to go its own way with:
    backward sums the cotangents of this rank's part."""
    check_axes("gather_sequence", x)
    return all_gather(x, comm, TIME)


def reduce_scatter_sequence(x, comm):
    """This rank's part of the sum of all ranks' x: (batch, time, dim) -> (batch, time/t, dim)."""
    check_axes("reduce_scatter_sequence", x)
    check_length(x.shape[TIME], comm)
    return reduce_scatter(x, comm, TIME)


def check_choice(name, sequence_parallel, tp_comm_overlap=False):
    """ValueError unless it is one of the CHOICES, and one with messages where products are to hide them."""
    if sequence_parallel not in CHOICES:
        raise ValueError(f"{name}: sequence_parallel={sequence_parallel!r} must be one of "
                         f"{', '.join(map(repr, CHOICES))}")
    if tp_comm_overlap not in (False, True):
        raise ValueError(f"{name}: tp_comm_overlap={tp_comm_overlap!r} must be False or True")
    if tp_comm_overlap and not sequence_parallel:
        raise ValueError(f"{name}: tp_comm_overlap=True is of what sequence_parallel gathers and scatters, and that is "
                         "False: set sequence_parallel=True or \"regather\" with it")


def linear(x, weight, bias, comm, regather, product=ops.linear):
    """ops.linear of all ranks' parts of a sequence, (batch, time/t, in) -> (batch, time, out).

    regather  keep this rank's part alone for backward, and gather the others' once more there
    product   in ops.linear's place: product(x, weight, bias), which saves a matrix x as it is; one with a `by_sequence`
              that is true is told the sequences' shape, whose positions are the rows of x where they are one matrix
    """
    check_axes("gather_sequence", x)
    if not regather:
        return product(gather_sequence(x, comm), weight, bias)
    rows, shape = _rows(x, comm), (x.shape[0], comm.size * x.shape[TIME], x.shape[-1])
    told = {"shape": shape} if getattr(product, "by_sequence", False) else {}
    with saved_tensors_hooks(*_keeping(x, rows, comm)):
        y = product(rows, weight, bias, **told)
    return ops.reshape(y, (*shape[:2], y.shape[-1]))


def _rows(x, comm):
    """The whole sequences as one matrix, which is just what a product of it saves."""
    whole = gather_sequence(x, comm)
    return ops.reshape(whole, (math.prod(whole.shape[:-1]), whole.shape[-1]))


class Part(NamedTuple):
    """What is kept of a gathered array."""

    here: object
    date: int


def _keeping(x, rows, comm):
    """saved_tensors_hooks that keep x for rows; all else goes the way of the hooks around."""
    outer_pack, outer_unpack = state.pack or (lambda array: array, lambda kept: kept)
    whole, here = lower(rows), lower(x)

    def pack(array):
        return Part(outer_pack(here), tick()) if array is whole else outer_pack(array)

    def unpack(kept):
        if kept.__class__ is not Part:
            return outer_unpack(kept)
        part = outer_unpack(kept.here)
        if write := log.since(part, kept.date):
            raise RuntimeError(f"backward gathers a sequence again, but {write[1]} has overwritten this rank's part of "
                               f"shape {part.shape} since: call backward() before the write")
        again = _rows(part, comm)
        log.forget(again)
        return again
    return pack, unpack


# ---------------------------------------------------------------- modules between the tensor-parallel parts

class SequenceParallel(Module):
    """A module that works on each position by itself, on this rank's part of the sequence: the gradients of its
    parameters are summed over the ranks, one all-reduce each. It adds nothing to their names."""

    def __init__(self, module, comm):
        super().__init__()
        self.add_module("", module)
        self.comm = comm

    @property
    def module(self):
        """The wrapped module."""
        return self._modules[""]

    def forward(self, *inputs):
        with summed(self.module, self.comm):
            return self.module(*inputs)


@contextmanager
def summed(module, comm, but=None):
    """Inside, the module's parameters, but for those of the module `but` in it, are copy_to of themselves."""
    own = [(owner, name, p) for owner in module.modules() if owner is not but
           for name, p in owner._parameters.items() if p is not None]
    try:
        for owner, name, p in own:
            object.__setattr__(owner, name, copy_to(p, comm))
        yield
    finally:
        for owner, name, p in own:
            object.__setattr__(owner, name, p)


class SequenceParallelPositions(Module):
    """A table of positions: a slice or integers (batch, time), the same on all ranks -> this rank's part of these rows,
    (time/t, dim) or (batch, time/t, dim)."""

    def __init__(self, whole, comm):
        super().__init__()
        self._register(self._parameters, "weight", whole.weight)
        self.comm = comm

    def forward(self, indices):
        rows = self.weight[indices] if isinstance(indices, slice) else ops.embedding(indices, self.weight)
        time = len(rows.shape) - 2
        check_length(rows.shape[time], self.comm)
        return scatter_to(rows, self.comm, time)

    def extra_repr(self):
        return ", ".join(map(str, self.weight.shape))


def on_part(module, comm):
    """The module for this rank's part of the sequence; its dropouts are changed in place."""
    if isinstance(module, Embedding):
        return SequenceParallelPositions(module, comm)
    dropouts_on_part(module, comm)
    return module if isinstance(module, Dropout) else SequenceParallel(module, comm)


def dropouts_on_part(module, comm):
    """Let the dropouts of a module be of this rank's part of the sequence."""
    for m in module.modules():
        if isinstance(m, Dropout) and is_known(m):
            of_part(m, comm=comm)


# ---------------------------------------------------------------- plans

WAY, WHOLE = "sequence", "whole sequences"
MIXING = (MultiHeadAttention, BatchNorm, MoE, TransformerBlock, GPT)         # they look at several positions at once
# There is nothing to sum and nothing to draw.
INDIFFERENT = (ReLU, Tanh, Sigmoid, LeakyReLU, GELU, SwiGLU, Sequential, FeedForward, Context)


def between(model):
    """{path of a module: way} of what lies between the parts that plan_of cuts."""
    plan = {}
    for path, module in model.named_modules():
        names = (("norm1", "norm2", "dropout") if isinstance(module, TransformerBlock) else
                 ("position", "dropout", "norm") if isinstance(module, GPT) else ())
        plan |= {f"{path}.{name}" if path else name: WAY for name in names if name in module._modules}
        plan |= {path: WHOLE} if path and isinstance(module, MoE) else {}
    return plan


def check_plan(modules, chosen):
    """Whether a plan says of every module what becomes of it; modules {path: module}, chosen {path: way}.

    ValueError of parameters, dropouts and unknown modules that would get a part of the sequence unawares, of dropouts
    of one's own, and of "experts"; TypeError where a module that looks at several positions at once is called
    "sequence".
    """
    if ahead := [path or "the model" for path, m in modules.items() if isinstance(m, MultiTokenPrediction)]:
        raise ValueError(f"parallelize_module: sequence_parallel divides the sequences, and {ahead[0]} puts positions "
                         "together with later tokens, which other ranks have: leave it out")
    if across := [path for path, m in modules.items() if isinstance(m, CrossAttention)]:
        raise ValueError(f"parallelize_module: sequence_parallel divides the sequences, and {across[0]} looks at "
                         "another one, of which it isn't known whether a rank has all or a part: leave it out")
    for path, way in chosen.items():
        if way == "experts":
            raise ValueError(f"parallelize_module: {path}: 'experts' are cut over an axis of their own, along which "
                             "the samples are divided too: by a call of its own, without sequence_parallel")
        below = [p for p in modules if p == path or p.startswith(f"{path}.")]
        if way == WAY and (mixing := [p for p in below if isinstance(modules[p], MIXING)]):
            raise TypeError(f"parallelize_module: {path} can't be {WAY!r}: {mixing[0]} is a "
                            f"{type(modules[mixing[0]]).__name__}, which looks at several positions at once")
        for p in below if way == WAY else ():
            check_dropout("parallelize_module", p, modules[p])
    covered = tuple(f"{path}." for path in chosen)
    left = [path or "the model itself" for path, module in modules.items() if not f"{path}.".startswith(covered)
            and type(module) not in INDIFFERENT and (not module._modules or isinstance(module, MoE) or any(
                p is not None for p in module._parameters.values()))]
    if left:
        raise ValueError(f"parallelize_module: with sequence_parallel, {', '.join(left)} would get a part of the "
                         f"sequence, and the plan doesn't say so. Name {'it' if len(left) == 1 else 'them'} in the "
                         f"plan: {WAY!r} for what works on each position by itself, or a way of cutting")
