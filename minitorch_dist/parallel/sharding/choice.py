"""Which factors of an op the axes of a mesh cut, and how its operands must lie for it: by the fewest bytes.

An operand that is cut proposes that its axis cut the same factor of the whole op. Where two proposals exclude each
other (an axis can cut one factor only, and a factor be cut by several axes only each inside of another's parts), all
that are possible are priced, bytes forward and backward, and the cheapest wins; among equals, the one that an earlier
operand proposes.
"""

import itertools
import math
from typing import NamedTuple

from .layouts import COPIES, SUM, WHOLE, Layout, Shard, nested, scaled
from .moves import moves, sent
from .rules import LINEAR


class Operand(NamedTuple):
    """What of an operand counts here: its shape, layout, bytes, whether a gradient flows to it, and whether it has
    floats of 16 bits."""

    shape: tuple
    layout: Layout
    nbytes: int
    wants_gradient: bool
    short: bool = False

    @property
    def itemsize(self):
        return self.nbytes // max(1, math.prod(self.shape))


class Choice(NamedTuple):
    """cuts: {axis: (the factor that it cuts, in which sections)}; nbytes: what a rank sends for it."""

    cuts: dict
    nbytes: float

    def __str__(self):
        return f"{', '.join(f'{axis} cuts {factor}' for axis, (factor, _) in self.cuts.items()) or 'nothing cut'}: " \
               f"{self.nbytes:,.0f} bytes"


def proposals(factors, operands, sizes):
    """{axis: [(factor, sections)]} that operands propose and the op allows, earlier operands first."""
    found = {}
    for operand, dims in zip(operands, factors.operands, strict=True):
        for axis, placement in operand.layout.shards.items():
            own = dims[placement.dim]
            if own and fits(factors, cut := of_factor(factors, operand, placement, own), sizes[axis]):
                if cut not in found.setdefault(axis, []):
                    found[axis].append(cut)
    return found


def of_factor(factors, operand, placement, own):
    """(the major factor of a dimension, the sections in which a placement cuts it), None for those that don't fit."""
    return own[0], scaled(placement.sections, factors.extents[own[0]], operand.shape[placement.dim])


def fits(factors, cut, n):
    """Whether n ranks can cut a factor so."""
    factor, sections = cut
    if factor in factors.whole or factors.extents[factor] < n or sections is None:
        return False
    if factor in factors.sectioned and sections != factors.sectioned[factor]:
        return False
    groups = [dim for side in (factors.operands, factors.results or ()) for dims in side for dim in dims
              if factor in dim]
    # Within a dimension of several factors only the major one has parts that lie together, and only equal ones; and a
    # section that becomes a result is a number of ranks times as large as a part of it.
    equal = not any(s % n for s in sections or (factors.extents[factor],))
    return all(dim[0] == factor for dim in groups) and (
        equal or factor not in factors.sectioned and all(len(dim) == 1 for dim in groups))


def side_by_side(factors, cuts, sizes):
    """Whether the axes that cut one factor can do so together."""
    by_factor = {}
    for axis, (factor, sections) in cuts.items():
        by_factor.setdefault(factor, []).append((sections, sizes[axis]))
    return all(len(own) == 1 or nested(factors.extents[factor], own) for factor, own in by_factor.items())


def stuck(factors, operands, sizes):
    """Whether some operand is cut along what this op needs whole."""
    return any(not dims[p.dim] or not fits(factors, of_factor(factors, operand, p, dims[p.dim]), sizes[axis])
               for operand, dims in zip(operands, factors.operands, strict=True)
               for axis, p in operand.layout.shards.items())


def choices(name, factors, operands, sizes):
    """[Choice], the best first."""
    offered = proposals(factors, operands, sizes)
    found = []
    for picked in itertools.product(*([*cuts, None] for cuts in offered.values())):
        cuts = {axis: cut for axis, cut in zip(offered, picked, strict=True) if cut is not None}
        if side_by_side(factors, cuts, sizes):
            found.append(cuts)
    most = max(map(len, found))
    found = [cuts for cuts in found if len(cuts) == most]       # none is given up that needn't be
    if len(found) == 1:
        return [Choice(found[0], 0.0)]
    return sorted((Choice(cuts, price(name, factors, operands, cuts, sizes)) for cuts in found),
                  key=lambda choice: choice.nbytes)


def price(name, factors, operands, cuts, sizes):
    """Bytes that a rank sends forward and backward, those included that a pending result will cost somebody."""
    total = 0.0
    for operand, target in zip(operands, targets(name, factors, operands, cuts), strict=True):
        total += sum(move.sent(operand.nbytes, sizes, operand.wants_gradient, operand.short)
                     for move in moves(operand.shape, operand.layout, target, sizes))
    widest = max(operands, key=lambda operand: operand.itemsize)
    for axis, (factor, _) in cuts.items():
        if factor in factors.lost:
            for result in factors.results:
                others = math.prod(sizes[a] for a, (f, _) in cuts.items() if any(f in dim for dim in result))
                nbytes = math.prod(factors.extents[f] for dim in result for f in dim) * widest.itemsize / others
                total += sent(SUM, WHOLE, nbytes, sizes[axis], False, widest.short)
    return total


def targets(name, factors, operands, cuts):
    """Per operand {axis: the placement that it needs}, of all axes that matter to the op."""
    axes = dict.fromkeys([*(axis for operand in operands for axis in operand.layout.placements), *cuts])
    kept = [axis for axis in axes if axis not in cuts and passes(name, operands, axis)]

    def target(operand, dims, axis):
        if axis in kept:
            return SUM if LINEAR[name] == "sum" or operand.layout[axis] == SUM else COPIES
        if axis not in cuts:
            return WHOLE
        factor, sections = cuts[axis]
        at = next((i for i, dim in enumerate(dims) if factor in dim), None)
        return COPIES if at is None else Shard(at, scaled(sections, operand.shape[at], factors.extents[factor]))
    return [{axis: target(operand, dims, axis) for axis in axes}
            for operand, dims in zip(operands, factors.operands, strict=True)]


def passes(name, operands, axis):
    """Whether a sum that is pending over this axis goes through the op, to be made later."""
    pending = [operand.layout[axis] == SUM for operand in operands]
    others = [operand for operand, p in zip(operands, pending, strict=True) if not p]
    constant = not any(operand.wants_gradient for operand in others)
    match LINEAR.get(name):
        case "sum":
            most = max((math.prod(o.shape) for o, p in zip(operands, pending, strict=True) if p), default=0)
            return any(pending) and all(o.layout[axis] == WHOLE and math.prod(o.shape) <= most for o in others)
        case "product":
            return pending.count(True) == 1 and constant
        case "quotient":
            return pending[0] and not any(pending[1:]) and constant
    return False


def results(factors, cuts, kept, shapes):
    """The results' Layouts, of whole shapes `shapes`. Over an axis that cuts a lost factor they are Partial."""
    found = []
    for dims, shape in zip(factors.results, shapes, strict=True):
        placements = dict.fromkeys(kept, SUM)
        for axis, (factor, sections) in cuts.items():
            at = next((i for i, dim in enumerate(dims) if factor in dim), None)
            if factor in factors.sectioned:
                sections = ()
            placements[axis] = SUM if at is None else Shard(at, scaled(sections, shape[at], factors.extents[factor]))
        found.append(Layout(len(shape), placements))
    return found
