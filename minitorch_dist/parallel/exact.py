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

Experts that are divided over ranks (experts/moe.py) get rows of several ranks' micro-shards at once. They multiply each
rank's by themselves, as one process does, and what a parameter gets from each is a leaf (Sources).
"""

from ..autodiff import ops
from ..autodiff.tensor import Tensor
from ..backend import module_of, xp
from ..comm.reduction import is_power_of_two
from ..nn.absent import Absent


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
    the size. After 2^k arrays, all of one shape, one sum is left.
    """

    def __init__(self):
        self.partial = []   # [(level, array)], the largest sums first
        self.free = []      # arrays to use again

    def add(self, array):
        """Take in one more array. It is overwritten with the sum that it completes."""
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


def along_tree(leaves):
    """The sum over the first axis, of 2^k, along the same tree."""
    while len(leaves) > 1:
        leaves = leaves[::2] + leaves[1::2]
    return leaves[0]


class Sources:
    """What each rank gives to the parameters of a module that is `divided_over` ranks which have samples of their own.

    Rows that come from n ranks are multiplied by n copies of a parameter, which are one piece of memory seen n times,
    (n, *shape); and that is a leaf, whose gradient is n gradients. The parameter itself has none until they have been
    added up, by the wrapper that has made this. A copy of the module has no sources, for nobody would add them up.
    """

    def __init__(self, module):
        self.ranks = module.divided_over.size
        self.leaves = {id(p): (p, Tensor(self._copies(p.data)).requires_grad_())
                       for p in module._parameters.values() if p is not None and p.requires_grad}

    def __reduce__(self):
        return type(None), ()

    def _copies(self, values):
        return module_of(values).broadcast_to(values, (self.ranks, *values.shape))

    def each(self, parameter):
        """The copies (ranks, *shape)."""
        known, leaf = self.leaves.get(id(parameter), (None, None))
        if known is not parameter or not parameter.requires_grad:
            return ops.broadcast_to(parameter, (self.ranks, *parameter.shape))
        leaf.data = self._copies(parameter.data)
        return leaf

    def in_a_row(self, parameter):
        """Those of a stack (experts, …) as one: (ranks · experts, …)."""
        return ops.reshape(self.each(parameter), (-1, *parameter.shape[1:]))

    def let_go(self):
        """Hold no values: whoever has gathered them may want to free them."""
        for p, leaf in self.leaves.values():
            leaf.data = Absent(leaf.shape, leaf.dtype, p.device, "copies of a parameter are here in forward only")


def check_by_source(tensors, grads):
    """RuntimeError where parameters that get gradients by Sources have got some in another way, or hooks wait for them:
    both would come to nothing."""
    for t, grad in zip(tensors, grads, strict=True):
        if grad is not None:
            raise RuntimeError(f"exact mode: a gradient of a share of experts, {t.shape}, doesn't come by their "
                               "answers and has no place in the tree: keep their parameters themselves out of the loss")
        if t.leaf.hooks or getattr(t.leaf, "grad_hooks", ()):
            raise RuntimeError(f"exact mode: a hook waits for the gradient of a share of experts, {t.shape}, which has "
                               "one when the ranks' are added up, after backward: look at it there")
