"""Layouts: how a value lies on a mesh of ranks, as plain data that prints.

    (dp, ·)          rows cut over dp, columns whole; the same on all ranks of any other axis
    (dp, tp)         a block on every rank
    (·, ·) + Σtp     what the ranks of tp hold has to be added up, and nobody has done it yet
    (tp[8|4|4], ·)   cut section by section: every rank has its share of each (of queries, of keys, of values)
    (dp × tp:2, ·)   rows cut over both, dp first: tp has its share of each of 2 equal sections, which are dp's parts

A layout says for each axis of the mesh what torch's DTensor calls a placement: Shard(dim), Partial(), and Replicate()
for all others. An axis cuts one dimension at most. A dimension whose extent the ranks can't share equally is cut as
data.loader.share cuts.

Several axes may cut one dimension, each inside of the parts that those before it make. Of 8 rows on 2 × 2 ranks:

    rows            0 1 2 3 4 5 6 7      a rank has the rows that it has by both
    dp              0 0 0 0 1 1 1 1      Shard(0)
    tp:2            0 0 1 1 0 0 1 1      Shard(0, (4, 4)), which stays the same when dp's parts are brought together

So an axis' placement says by itself which rows its ranks have, and no axis has to know of the others.
"""

import itertools
import operator
from dataclasses import dataclass, field
from math import prod

from ...data.loader import share


@dataclass(frozen=True)
class Shard:
    """Each rank of the axis has a part along dimension `dim`: its share of each of the sections, whose extents add up
    to the dimension's; () is one section, and ValueError where one is given: Shard(0, (8,)) would not be Shard(0)."""

    dim: int
    sections: tuple = ()

    def __post_init__(self):
        if self.sections:
            object.__setattr__(self, "sections", tuple(map(operator.index, self.sections)))
        if len(self.sections) == 1:
            raise ValueError(f"Shard({self.dim}, {self.sections}): one section is the dimension: leave it out")


@dataclass(frozen=True)
class Replicate:
    """The ranks of the axis have the same, and it is one value: its cotangent counts once."""


@dataclass(frozen=True)
class Partial:
    """The value is the sum of what the ranks of the axis have."""


@dataclass(frozen=True)
class Copies:
    """The ranks of the axis have the same, and each goes its own way with it: its cotangent is the sum of theirs. No
    layout has this: an op's operands do, while it runs."""


WHOLE, SUM, COPIES = Replicate(), Partial(), Copies()


@dataclass(frozen=True)
class Layout:
    """The placement of a value of `ndim` dimensions on each axis of a mesh; on those not named it is Replicate()."""

    ndim: int
    placements: dict = field(default_factory=dict)      # {axis: Shard or Partial}

    def __post_init__(self):
        if strange := [p for p in self.placements.values() if not isinstance(p, Shard | Partial | Replicate)]:
            raise TypeError(f"Layout: {strange[0]!r} is no placement of an axis: Shard(dim), Partial() or Replicate()")
        kept = {axis: p for axis, p in self.placements.items() if p != WHOLE}
        object.__setattr__(self, "placements", kept)

    def __getitem__(self, axis):
        return self.placements.get(axis, WHOLE)

    @property
    def shards(self):
        """{axis: Shard}."""
        return {axis: p for axis, p in self.placements.items() if p.__class__ is Shard}

    @property
    def pending(self):
        """The axes over which the value is still to be added up, in order."""
        return tuple(axis for axis, p in self.placements.items() if p == SUM)

    def cutting(self, dim):
        """{axis: Shard} of those that cut a dimension, the outer ones first."""
        found = [(axis, p) for axis, p in self.shards.items() if p.dim == dim]
        return dict(sorted(found, key=lambda pair: len(pair[1].sections)))

    def __str__(self):
        dims = [" × ".join(axis + _text(p.sections) for axis, p in self.cutting(dim).items()) or "·"
                for dim in range(self.ndim)]
        return f"({', '.join(dims)}{',' * (self.ndim == 1)})" + "".join(f" + Σ{axis}" for axis in self.pending)

    def check(self, name, shape, sizes):
        """ValueError unless a value of this shape can lie so; sizes: {axis: its number of ranks}."""
        if self.ndim != len(shape) or self.placements.keys() - sizes.keys():
            raise ValueError(f"{name}: layout {self} for shape {tuple(shape)} on a mesh of axes {', '.join(sizes)}")
        for axis, p in self.shards.items():
            if not 0 <= p.dim < len(shape):
                raise ValueError(f"{name}: axis {axis!r} is to cut dimension {p.dim} of shape {tuple(shape)}")
        for dim, extent in enumerate(shape):
            axes = self.cutting(dim)
            n, both = prod(sizes[axis] for axis in axes), " and ".join(map(repr, axes))
            axis = f"ax{'es' if len(axes) > 1 else 'is'} {both}"
            if extent < n > 1:
                raise ValueError(f"{name}: dimension {dim} of shape {tuple(shape)} has {extent} elements, fewer than "
                                 f"the {n} ranks of {axis}: leave it whole there")
            for each, p in axes.items():
                if p.sections and (sum(p.sections) != extent or min(p.sections) < sizes[each]):
                    raise ValueError(f"{name}: axis {each!r}: sections {p.sections} of dimension {dim} must add up to "
                                     f"its {extent} elements, and each have one at least for each of {sizes[each]} "
                                     "ranks; the parts that an outer axis makes are its sections, too")
            if not nested(extent, [(p.sections, sizes[each]) for each, p in axes.items()]):
                raise ValueError(f"{name}: {axis} are to cut dimension {dim} of shape {tuple(shape)}, none of them "
                                 f"inside of another's parts: say which is the outer one, as in mesh_split(x, mesh, "
                                 f"[({', '.join(map(repr, axes))}), …])")

    def local_shape(self, shape, ranks):
        """What a rank has of a value of this shape; ranks: {axis: (its rank there, how many there are)}."""
        return tuple(sum(hi - lo for lo, hi in intervals) for intervals in self.local_intervals(shape, ranks))

    def local_intervals(self, shape, ranks):
        """Per dimension [(lo, hi)], where in the whole this rank's elements lie; ranks: as local_shape's."""
        return [held(extent, [(p.sections, *ranks[axis]) for axis, p in self.cutting(dim).items()])
                for dim, extent in enumerate(shape)]


def _text(sections):
    """Of equal sections how many there are, of others all."""
    n = len(sections)
    equal = sections == lengths(share(sum(sections), i, n) for i in range(n))
    return f":{n}" if n and equal else f"[{'|'.join(map(str, sections))}]" if n else ""


def lengths(intervals):
    """Of [(lo, hi)]."""
    return tuple(hi - lo for lo, hi in intervals)


def parts(extent, sections, rank, n):
    """[(lo, hi)]: what a rank has of a dimension that is cut in these sections."""
    found, first = [], 0
    for section in sections or (extent,):
        lo, hi = share(section, rank, n)
        found.append((first + lo, first + hi))
        first += section
    return found


def held(extent, cuts):
    """[(lo, hi)]: what a rank has of a dimension that several axes cut; cuts: [(sections, rank, n)], of each."""
    found = [(0, extent)]
    for cut in cuts:
        found = [(max(a, c), min(b, d)) for a, b in found for c, d in parts(extent, *cut) if max(a, c) < min(b, d)]
    return found


def inside(extent, cuts):
    """The sections of an axis that cuts each part which the others make; cuts: [(sections, n)], of each of those."""
    bounds = {0, extent} | {bound for sections, n in cuts if n > 1 for rank in range(n)
                            for interval in parts(extent, sections, rank, n) for bound in interval}
    sections = lengths(itertools.pairwise(sorted(bounds)))
    return sections if len(sections) > 1 else ()


def nested(extent, cuts):
    """Whether several axes can cut one dimension, each inside of the parts of those before it, and all ranks then have
    something; cuts: [(sections, n)]."""
    cuts = sorted((cut for cut in cuts if cut[1] > 1), key=lambda cut: len(cut[0]))
    for i, (sections, n) in enumerate(cuts):
        sections = sections or (extent,)
        outer = inside(extent, cuts[:i]) or (extent,)
        if min(sections) < n or not {*_ends(outer)} <= {*_ends(sections)}:
            return False
    return True


def _ends(sections):
    return itertools.accumulate(sections)


def scaled(sections, extent, old):
    """Sections of a dimension of `old` elements as those of one of `extent`, in units as much larger or smaller; None
    where they don't fall between its elements."""
    if not sections:
        return ()
    if any(s * extent % old for s in sections):
        return None
    return tuple(s * extent // old for s in sections)
