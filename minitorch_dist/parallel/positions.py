"""Sequences of which a rank has some positions: the axis that is divided, its checks, means over all, and dropout.

Two forms of parallelism divide it, and go together: context parallelism over ranks that have whole matrices, or parts
of them, and sequence parallelism over those that have the parts:

    sequence   0 1 2 3 4 5 6 7 8 9 …     cp 0 has 0 1 2 3 12 13 14 15, in a zigzag     its tp 0: 0 1 2 3
               ───────────────────── ──▸                                           ──▸
               context parallelism       sequence parallelism                              tp 1: 12 13 14 15
"""

import numpy as np

from .. import backend
from ..autodiff import ops
from ..autodiff.primitive import lower
from ..backend import is_whole, to_device_of
from ..nn.decoding import by_position
from ..nn.layers import Dropout
from .collectives import copy_to, reduce_from

TIME = HEADS = 1


def check_axes(name, x):
    """ValueError unless x is (batch, time, dim)."""
    if len(x.shape) != 3:
        raise ValueError(f"{name}: shape {tuple(x.shape)}; sequence parallelism is for (batch, time, dim)")


def check_length(time, comm):
    """ValueError unless the ranks of sequence parallelism can share so many positions equally."""
    n = comm.size
    if time % n:
        shorter = f", or cut them to {time - time % n}" if time > n else ""
        raise ValueError(f"sequence parallel: {n} ranks can't share {time} positions equally: pad the sequences to "
                         f"{time + n - time % n}{shorter} (or what cut_sequence leaves of them)")


class Positions:
    """Who has other positions of the sequences that a mixture of experts routes, for means over them all (nn.MoE).

    alike    the ranks that all have the loss of all positions (sequence parallelism); None: nobody
    context  those that have each the loss of their own ones, of which the sum counts (context parallelism); None
    """

    alike = context = None

    def mean(self, x):
        """Of all ranks' x, the same on all of them."""
        x = self.of_linear(x)
        # What one of them makes of it, all the others' x have part in.
        return x if self.context is None else copy_to(reduce_from(x, self.context), self.context) / self.context.size

    def of_linear(self, x):
        """The same of what a loss is linear in, where the sum over `context` counts: there each rank's own will do."""
        return x if self.alike is None else reduce_from(x, self.alike) / self.alike.size


def shared_by(moe, **ranks):
    """Let a MoE's auxiliary loss be of all positions, with Positions' attributes by name."""
    moe.positions = moe.positions or Positions()
    vars(moe.positions).update(ranks)


def check_routing(what, moe, instead):
    """ValueError unless ranks that share sequences can route each their own positions of a MoE. what: whose ranks share
    them; instead: what else to do."""
    if moe.capacity_factor is not None:
        raise ValueError(f"{what}, and capacity_factor={moe.capacity_factor}: who finds a place depends on tokens that "
                         f"other ranks have: take capacity_factor=None, or {instead}")
    if is_whole(moe.group) and moe.balance:
        raise ValueError(f"{what}, and balance={moe.balance} is of groups of {moe.group} tokens, of which other ranks "
                         f'have some: take group="sequence" or None, or {instead}')


class PartDropout(Dropout):
    """Dropout of this rank's part of an activation, by that part of the mask of all of it.

    context   the context_parallel.Context that knows which positions of the sequences those of comm's ranks are; None:
              all of them
    comm      the ranks of sequence parallelism, which have equally many of these, in order; None: this one has them all
    features  (which of the last axis this rank has, of how many); None: all of them
    heads     the same of the axis of (batch, heads, time, sources)
    over      the ranks of all_to_all, which share these heads, or all, equally (context/context.py); None: no one does
    x is (batch, time, …) where a context or comm divides the positions, with comm (batch, time, dim), else ValueError;
    (…, dim) where nothing does.
    """

    context = comm = features = heads = over = None

    @by_position
    def forward(self, x):
        if not self.training or self.p == 0:
            return x
        shape, positions = list(x.shape), None
        if self.comm is not None or self.context is not None:
            shape[TIME], positions = self._positions(x)
        if self.features is not None:
            indices, shape[-1] = self.features
        elif self.heads is not None or self.over is not None:
            heads, shape[HEADS] = self._heads(x.shape[HEADS])
        draws = backend.random_rows(tuple(shape), lower(x))
        if positions is not None:
            draws = draws[:, positions]
        if self.features is not None:
            draws = draws[..., to_device_of(indices, lower(x))]
        elif self.heads is not None or self.over is not None:
            draws = draws[:, to_device_of(heads, lower(x))]
        return ops.dropout(x, self.p, mask=draws >= self.p)

    def _heads(self, n):
        """(which heads the n are that are here, of how many)."""
        ranks, rank = (1, 0) if self.over is None else (self.over.size, self.over.rank)
        heads, count = self.heads or (np.arange(ranks * n), ranks * n)
        return heads[rank * n:(rank + 1) * n], count

    def _positions(self, x):
        """(how many positions all ranks have, which of them this one has)."""
        if self.comm is not None:
            check_axes(type(self).__name__, x)
        ranks, rank = (1, 0) if self.comm is None else (self.comm.size, self.comm.rank)
        time = x.shape[TIME]
        length, here = ranks * time, slice(rank * time, (rank + 1) * time)
        if self.context is None:
            return length, here
        return self.context.length(length), to_device_of(self.context.positions(length)[here], lower(x))


def of_part(dropout, **part):
    """Let a Dropout be one of this rank's part, in place: it stays the same object, with its mode and hooks. part:
    PartDropout's attributes, by name. Returns it."""
    dropout.__class__ = PartDropout
    for name, value in part.items():
        object.__setattr__(dropout, name, value)        # a Context stands in the tree of modules elsewhere
    return dropout


def is_known(dropout):
    """Whether it is known what a Dropout does of a part."""
    return type(dropout) in (Dropout, PartDropout)


def check_dropout(caller, path, module):
    """ValueError for a Dropout of which nobody knows what this rank's part would be."""
    if isinstance(module, Dropout) and not is_known(module):
        raise ValueError(f"{caller}: {path}, of class {type(module).__name__}, is a Dropout of its own making, and "
                         "would draw for this rank's positions as for all: take nn.Dropout, or make it a Module, if it "
                         "works on each position by itself")
