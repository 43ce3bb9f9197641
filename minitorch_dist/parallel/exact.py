"""Sums that are equal to the last bit, however many ranks share the work.

Floating-point addition is not associative: (a+b)+c and a+(b+c) differ in the
last bits, so the usual gradient depends on the number of ranks. Here the global
batch is always cut into V micro-shards, and their gradients are always added
along the same balanced binary tree,

    ((g0 + g1) + (g2 + g3)) + ((g4 + g5) + (g6 + g7))        V = 8
     ------- rank 0 -------     ------- rank 1 -------       2 ranks
     -rank 0-    -rank 1-       -rank 2-    -rank 3-         4 ranks

whoever holds which leaf: inside a rank by a binary counter of partial sums,
across ranks by exchanging with rank XOR 1, 2, 4 …
"""

from ..backend import xp
from ..comm.reduction import is_power_of_two


def check_shape(micro_shards, ranks):
    """Raise ValueError unless the tree over V micro-shards splits into one whole subtree per rank."""
    if micro_shards < 1 or not is_power_of_two(micro_shards):
        raise ValueError(f"exact mode adds gradients along a balanced binary tree, so the number of micro-shards must "
                         f"be a power of two; got {micro_shards}")
    if not is_power_of_two(ranks) or micro_shards % ranks:
        raise ValueError(f"exact mode with {micro_shards} micro-shards runs on 1, 2, 4 … {micro_shards} ranks (a power "
                         f"of two that divides it), not on {ranks}: change -n, or leave exact mode")


class BinaryCounter:
    """Adds arrays up along a balanced binary tree as they come, holding log2(n) partial sums.

    Like counting in binary: two sums of the same size merge into one of twice
    the size. After 2^k arrays one sum is left.
    """

    def __init__(self):
        self.partial = []   # [(level, array)], the largest sums first
        self.free = []      # arrays to use again

    def add(self, array):
        """Take in one more array (1-d). It is overwritten with the sum that it completes."""
        level = 0
        while self.partial and self.partial[-1][0] == level:
            _, left = self.partial.pop()
            xp.add(left, array, out=array)
            self.free.append(left)
            level += 1
        keep = self.free.pop() if self.free else xp.empty_like(array)
        keep[...] = array
        self.partial.append((level, keep))

    def forget(self):
        """Begin anew, whatever was added."""
        self.free += [array for _, array in self.partial]
        self.partial.clear()

    def total(self):
        """The sum of all arrays added since the last call (2^k of them); the counter starts again."""
        if len(self.partial) != 1:
            raise RuntimeError(f"{sum(1 << level for level, _ in self.partial)} arrays were added; "
                               "a balanced tree needs a power of two")
        (_, result), = self.partial
        self.partial.clear()
        self.free.append(result)
        return result
