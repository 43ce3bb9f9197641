"""The window of ranks that live on several nodes: what stays on a node goes through its memory, the rest through MPI.

Four ranks on two nodes reduce an array, in two lanes:

    node 0, rank 0   adds up the first half of 0 and 1 ┐  MPI all-reduce   ┌ writes the sum to the first half of 0 and 1
    node 1, rank 2   adds up the first half of 2 and 3 ┘  between the two  └ writes the sum to the first half of 2 and 3
    ranks 1 and 3    do the same with the second half, at the same time

A lane is one rank of each node, and reduces one slice. There are as many as the smallest node has ranks; on larger
nodes the ranks that are left over only wait. With a single lane its ranks are what others call the nodes' leaders; more
lanes are the same code, and share the additions and the sending among the cores. MPI gives all ranks of a lane the
same bits, and the ranks of a node read what one of them has written: so all have the same.

Where nodes are blocks of equally many consecutive ranks, reduce_scatter and all_gather go the same way, and so do exact
sums on a power of two of ranks: the tree over the ranks is then the tree over each node's, continued by that over the
nodes. Everything else is left to the engine (the calls here return None), which goes across nodes as MPI likes; exact
sums by their own tree.
"""

import numpy as np

from . import mismatch
from .memory import map_together
from .reduction import cut
from .shared import GRAIN, LINE_BYTES, Window
from .work import Then


class NodesWindow(Window):
    """One window for the ranks of each node, and the collectives that go through it and across. As shared.Window."""

    remembers = False

    @classmethod
    def open(cls, engine, name):
        """The window, or None (on all ranks) where no two ranks share memory. Collective."""
        if max(map(len, engine.nodes)) == 1:
            return None
        node = engine.of_node()
        lines = map_on_every_node(engine, node, LINE_BYTES)
        return None if lines is None else cls(engine, node, name, lines)

    def __init__(self, engine, node, name, lines):
        super().__init__(node, name, lines)
        self.checked = False     # by lines, which reach no farther than the node
        self._spins = 0          # waiting for a network, the core may as well be offered to somebody
        self.check = mismatch.AcrossNodes(engine, name) if mismatch.wanted() else None
        self.whole, self.lanes = engine, min(map(len, engine.nodes))
        self.lane = engine.split(node.rank if node.rank < self.lanes else None, engine.rank)
        self.in_blocks = (engine.nodes == [list(range(first, first + node.size))
                                           for first in range(0, engine.size, node.size)])
        self.across = len(engine.nodes) - 1
        self.keeps_tree = self.in_blocks     # of a power of two of ranks; of others there are no exact sums

    def _map(self, nbytes):
        return map_on_every_node(self.whole, self.engine, nbytes)

    # ------------------------------------------------------------ collectives

    def all_reduce(self, x, place, op, exact=False):
        """Each rank reduces the slice of its lane: over its node, then over the lane; and writes it to all of its
        node."""
        if self.lane is None:
            return lambda: None
        segment, offset = place
        first, last = cut(x.size, self.rank, self.lanes, GRAIN)
        slices = segment.views(offset + first * x.itemsize, last - first, x.dtype)
        result = slices[0]

        def spread():
            if op == "mean":
                np.divide(result, self.whole.size, out=result)
            for other in slices[1:]:
                np.copyto(other, result)

        def begin():
            if not result.size:
                return None
            self.add_up(self.blocks(slices, slices[:1]), sum_for_mean(op))
            return Then(self.lane.all_reduce(result, sum_for_mean(op), exact, async_op=True), spread)
        return begin

    def reduce(self, x, place, dst, op):
        """By the engine."""

    def reduce_scatter(self, out, x, place, op):
        """Each rank adds up, over its node, the parts of all ranks of its lane, which then exchange them."""
        if not self.in_blocks:
            return None
        rows = self._rows_of_lane(place, out.size, x.dtype)
        sums = np.empty((len(rows), out.size), x.dtype)

        def divide():
            if op == "mean":
                np.divide(out, self.whole.size, out=out)

        def begin():
            for row, parts in zip(sums, rows, strict=True):
                self.add_up(self.blocks(parts, [row]), sum_for_mean(op))
            return Then(self.lane.reduce_scatter(out, sums, sum_for_mean(op), async_op=True), divide)
        return begin

    def all_gather(self, out, place, x):
        """The ranks of a lane exchange what they have, and each writes all of it to its node."""
        if not self.in_blocks:
            return None
        rows = self._rows_of_lane(place, x.size, x.dtype)
        everything = np.empty((len(rows), x.size), x.dtype)

        def spread():
            for row, copies in zip(everything, rows, strict=True):
                for copy in copies:
                    np.copyto(copy, row)
        return lambda: Then(self.lane.all_gather(everything, x, async_op=True), spread)

    def _rows_of_lane(self, place, count, dtype):
        """Of an array of one part of `count` elements per rank: the parts of this lane's ranks, on all ranks here."""
        segment, offset = place
        return [segment.views(offset + rank * count * dtype.itemsize, count, dtype)
                for rank in range(self.rank, self.whole.size, self.size)]

    def sent(self, x):
        """(bytes that this rank sends in an all-reduce of x, those of them that go to another node).

        2(n-1) slices within a node of n ranks, and 2(K-1) K-ths of a slice along a lane of K nodes. Summed over the
        ranks that is 2(N-1) times the array: what a ring sends.
        """
        if self.lane is None:
            return 0, 0
        first, last = cut(x.size, self.rank, self.lanes, GRAIN)
        begin, end = cut(last - first, self.lane.rank, self.lane.size)
        between = 2 * self.across * (end - begin) * x.itemsize
        return 2 * (self.size - 1) * (last - first) * x.itemsize + between, between

    # ------------------------------------------------------------ meeting

    def post(self, key, place=None):
        """As in a window; the check goes across."""
        number = super().post(key, place)
        if self.check is not None:
            self.check.post(key, place)
        return number

    def arrived(self, number):
        """True once all ranks of the node have come to collective `number`, and, if calls are checked, all ranks."""
        return (self.check is None or self.check.arrived(number)) and super().arrived(number)


def sum_for_mean(op):
    """What is done on the way: a mean is divided once, at the end."""
    return "sum" if op == "mean" else op


def map_on_every_node(whole, node, nbytes):
    """map_together on each node; None on all ranks where it fails on one node. Collective."""
    parts = map_together(node, nbytes)
    mapped = np.array([parts is not None], np.int32)
    whole.all_reduce(mapped, "min")
    return parts if mapped[0] else None
