"""From one layout to another: by which moves, in which order, and what they send. As data: resharding.py makes them.

A move changes the placement on one axis. What the other axes cut stays so, and the move sees what they leave of the
whole as if it were a whole. Of 8 rows in the layout (dp × tp:2,), on the rank with coordinates (0, 1):

    it has          2 3
    tp lets go      0 1 2 3         all-gather over tp: (dp,)
    dp lets go      2 3 6 7         all-gather over dp instead: (tp:2,)
"""

from math import prod
from typing import NamedTuple

from .layouts import WHOLE, Copies, Layout, Partial, Replicate, Shard, held, nested, parts

# What a rank sends to get from one placement to another, forward and backward, in units of M (n - 1)/n: M bytes has the
# value that the n ranks hold together. An exchange of dimensions takes an n-th of that: see `sent`. In the order in
# which moves are made: the fewer elements the better, so parts come first, whole values last.
SENT = {
    (Replicate, Shard): (0, 1), (Partial, Shard): (1, 1), (Shard, Shard): (1, 1), (Partial, Replicate): (2, 0),
    (Partial, Copies): (2, 2), (Shard, Replicate): (1, 0), (Shard, Copies): (1, 1), (Replicate, Copies): (0, 2),
    (Replicate, Partial): (0, 0),
}
ORDER = list(SENT)


def adds(old, new):
    """Whether a move between these kinds of placement adds up: what is pending, or in backward what copies get."""
    return old is Partial or new is Copies


def sent(old, new, nbytes, n, backward, short=False):
    """Bytes that one of n ranks sends to change the placement of a value of `nbytes`, perhaps with backward's. short:
    it has floats of 16 bits, and of these moves that add up send float32 (resharding.py)."""
    if old == new:
        return 0
    forth, back = SENT[type(old), type(new)]
    units = (forth + back * backward) * (2 if short and adds(type(old), type(new)) else 1)
    exchanged = isinstance(old, Shard) and isinstance(new, Shard) and old.dim != new.dim
    return units * nbytes * (n - 1) / (n * n if exchanged else n)


class Move(NamedTuple):
    """On `axis` a placement takes the place of another. beside: the Layout of what the other axes cut meanwhile."""

    axis: str
    old: object
    new: object
    beside: Layout

    def sent(self, nbytes, sizes, backward, short=False):
        """Bytes that a rank sends for it, of a whole value of `nbytes`, perhaps with backward's; short: of floats of 16
        bits. Where parts are unequal they are sent as long as the longest, which this doesn't count."""
        return sent(self.old, self.new, nbytes / prod(sizes[a] for a in self.beside.shards), sizes[self.axis], backward,
                    short)

    def cuts(self, shape, ranks):
        """(old, new), each as a Cut of what the other axes leave of a whole `shape`, None where it is no Shard; ranks:
        {axis: (its rank there, how many there are)}."""
        def cut(p):
            if not isinstance(p, Shard):
                return None
            left = held(shape[p.dim], [(q.sections, *ranks[axis]) for axis, q in self.beside.cutting(p.dim).items()])
            n = ranks[self.axis][1]
            return Cut(p.dim, [within(left, parts(shape[p.dim], p.sections, rank, n)) for rank in range(n)])
        return cut(self.old), cut(self.new)


class Cut(NamedTuple):
    """Along `dim` rank r has the intervals pieces[r]."""

    dim: int
    pieces: list

    @property
    def lengths(self):
        """How much each rank has."""
        return [sum(hi - lo for lo, hi in own) for own in self.pieces]


def within(outer, inner):
    """What two lists of intervals have in common, as intervals of the first one's elements."""
    found, first = [], 0
    for a, b in outer:
        for c, d in inner:
            lo, hi = first + max(a, c) - a, first + min(b, d) - a
            if lo < hi and found and found[-1][1] == lo:
                found[-1] = found[-1][0], hi
            elif lo < hi:
                found.append((lo, hi))
        first += b - a
    return found


def moves(shape, layout, target, sizes):
    """[Move] from a layout of a value of this whole shape to the target, {axis: placement}; axes that it doesn't name
    stay as they are. sizes: {axis: its number of ranks}."""
    now, found = dict(layout.placements), []
    waiting = {axis: new for axis, new in target.items() if new != now.get(axis, WHOLE)}

    def possible(axis, new):
        if not isinstance(new, Shard):
            return True
        others = [(p.sections, sizes[a]) for a, p in now.items()
                  if a != axis and isinstance(p, Shard) and p.dim == new.dim]
        return not others or nested(shape[new.dim], [*others, (new.sections, sizes[axis])])
    while waiting:
        ready = [axis for axis, new in waiting.items() if possible(axis, new)]
        # None is ready where axes exchange dimensions: then one lets go of its own first.
        axis = min(ready, key=lambda a: ORDER.index((type(now.get(a, WHOLE)), type(waiting[a])))) if ready else next(
            a for a in waiting if isinstance(now.get(a), Shard))
        old, new = now.pop(axis, WHOLE), waiting.pop(axis) if ready else WHOLE
        found.append(Move(axis, old, new, Layout(len(shape), {a: p for a, p in now.items() if isinstance(p, Shard)})))
        now[axis] = new
    return found
