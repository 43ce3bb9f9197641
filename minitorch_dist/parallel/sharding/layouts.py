"""Layouts: how a value lies on a mesh of ranks, as plain data that prints.

    (dp, ·)          rows cut over dp, columns whole; the same on all ranks of any other axis
    (dp, tp)         a block on every rank
    (·, ·) + Σtp     what the ranks of tp hold has to be added up, and nobody has done it yet
    (tp[8|4|4], ·)   cut section by section: every rank has its share of each (of queries, of keys, of values)

A layout says for each axis of the mesh what torch's DTensor calls a placement: Shard(dim), Partial(), and Replicate()
for all others. An axis cuts one dimension at most, and a dimension is cut by one axis at most. A dimension whose extent
the ranks can't share equally is cut as data.loader.share cuts.
"""

from dataclasses import dataclass, field

from ...data.loader import share


@dataclass(frozen=True)
class Shard:
    """Each rank of the axis has a part along dimension `dim`: its share of each of the sections, whose extents add up
    to the dimension's; () is one section."""

    dim: int
    sections: tuple = ()


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

# What a rank sends to get from one placement to another, forward and backward, in units of M (n - 1)/n: M bytes has the
# value that the n ranks hold together. An exchange of dimensions takes an n-th of that: see `sent`.
SENT = {
    (Replicate, Shard): (0, 1), (Replicate, Copies): (0, 2), (Replicate, Partial): (0, 0),
    (Shard, Replicate): (1, 0), (Shard, Copies): (1, 1), (Shard, Shard): (1, 1),
    (Partial, Replicate): (2, 0), (Partial, Copies): (2, 2), (Partial, Shard): (1, 1),
}


def sent(old, new, nbytes, n, backward):
    """Bytes that one of n ranks sends to change the placement of a value of `nbytes`, perhaps with backward's."""
    if old == new:
        return 0
    forth, back = SENT[type(old), type(new)]
    units = forth + back * backward
    exchanged = isinstance(old, Shard) and isinstance(new, Shard) and old.dim != new.dim
    return units * nbytes * (n - 1) / (n * n if exchanged else n)


@dataclass(frozen=True)
class Layout:
    """The placement of a value of `ndim` dimensions on each axis of a mesh; on those not named it is Replicate()."""

    ndim: int
    placements: dict = field(default_factory=dict)      # {axis: Shard or Partial}

    def __post_init__(self):
        kept = {axis: p for axis, p in self.placements.items() if p != WHOLE}
        object.__setattr__(self, "placements", kept)

    def __getitem__(self, axis):
        return self.placements.get(axis, WHOLE)

    @property
    def shards(self):
        """{axis: Shard}."""
        return {axis: p for axis, p in self.placements.items() if isinstance(p, Shard)}

    @property
    def pending(self):
        """The axes over which the value is still to be added up, in order."""
        return tuple(axis for axis, p in self.placements.items() if p == SUM)

    def __str__(self):
        dims = ["·"] * self.ndim
        for axis, p in self.shards.items():
            dims[p.dim] = axis + (f"[{'|'.join(map(str, p.sections))}]" if p.sections else "")
        return f"({', '.join(dims)}{',' * (self.ndim == 1)})" + "".join(f" + Σ{axis}" for axis in self.pending)

    def check(self, name, shape, sizes):
        """ValueError unless a value of this shape can lie so; sizes: {axis: its number of ranks}."""
        if self.ndim != len(shape) or self.placements.keys() - sizes.keys():
            raise ValueError(f"{name}: layout {self} for shape {tuple(shape)} on a mesh of axes {', '.join(sizes)}")
        taken = {}
        for axis, p in self.shards.items():
            if not 0 <= p.dim < len(shape):
                raise ValueError(f"{name}: axis {axis!r} is to cut dimension {p.dim} of shape {tuple(shape)}")
            if p.dim in taken:
                raise ValueError(f"{name}: axes {taken[p.dim]!r} and {axis!r} are both to cut dimension {p.dim} of "
                                 f"shape {tuple(shape)}; one axis can (a mesh may have one of as many ranks)")
            taken[p.dim], n, extent = axis, sizes[axis], shape[p.dim]
            if extent < n:
                raise ValueError(f"{name}: dimension {p.dim} of shape {tuple(shape)} has {extent} elements, fewer than "
                                 f"the {n} ranks of axis {axis!r}: leave it whole there")
            if p.sections and (sum(p.sections) != extent or any(s % n for s in p.sections)):
                raise ValueError(f"{name}: sections {p.sections} of dimension {p.dim} must add up to its {extent} "
                                 f"elements, and the {n} ranks of axis {axis!r} must divide each")

    def local_shape(self, shape, ranks):
        """What a rank has of a value of this shape; ranks: {axis: (its rank there, how many there are)}."""
        local = list(shape)
        for axis, p in self.shards.items():
            local[p.dim] = sum(hi - lo for lo, hi in parts(shape[p.dim], p.sections, *ranks[axis]))
        return tuple(local)


def parts(extent, sections, rank, n):
    """[(lo, hi)]: what a rank has of a dimension that is cut in these sections."""
    found, first = [], 0
    for section in sections or (extent,):
        lo, hi = share(section, rank, n)
        found.append((first + lo, first + hi))
        first += section
    return found


def even(extent, sections, n):
    """Whether all ranks have equally much."""
    return extent % n == 0      # (sections are divisible by n, see check)


def scaled(sections, extent, old):
    """Sections of a dimension of `old` elements as those of one of `extent`, in units as much larger or smaller; None
    where they don't fall between its elements."""
    if not sections:
        return ()
    if any(s * extent % old for s in sections):
        return None
    return tuple(s * extent // old for s in sections)
