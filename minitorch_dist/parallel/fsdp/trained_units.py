"""Units that are trained: beside their values, gradients, summed over the ranks, each of which gets its part.

    whole   |--- w1 ---|pad|- b1 -|pad|------ w2 ------|pad|       units.py
    grads   |--- w1 ---|pad|- b1 -|pad|------ w2 ------|pad|       this rank's own, until they are reduced
    flat    |     rank 0     |     rank 1     |     rank 2     |   a FlatBuffer of a rank's pieces: optimizers get these
"""

from itertools import pairwise

from ...autodiff.reverse import run_hooks
from ...autodiff.tensor import Tensor
from ...autodiff.writes import wrote
from ...backend import is_short, zeros
from ...flat import BLOCK, FlatBuffer
from ...ledger import event, keep, labelled, open_ledgers
from ..exact import BinaryCounter, along_tree, check_by_source
from .few_bits import SumOfRounded
from .mixed_precision import AS_IT_IS, SumOfShort
from .units import Unit


class Pieces(FlatBuffer):
    """A rank's pieces, and the sums of their gradients. Backward doesn't write there: where a loss has pieces in it (a
    penalty), their gradients come while those of the model are on their way here, and are added when the sum is."""

    def __init__(self, pieces, storage):
        self.grad_views = {}
        super().__init__(pieces, storage=storage)

    def _adopt(self, s):
        super()._adopt(s)
        self.grad_views[id(s.tensor)], s.tensor.leaf.grad_view = s.tensor.leaf.grad_view, None

    def grad_view(self, segment):
        return self.grad_views[id(segment.tensor)]


class TrainedUnit(Unit):
    """A Unit of parameters that want gradients.

    stage   1: the optimizer's state is cut; 2: gradients as well; 3: parameters as well (fully_sharded.py)
    policy  a MixedPrecisionPolicy: the dtypes of whole and grads, and how they travel
    leaves  one per parameter, that backward leaves gradients in: the tensors, or exact mode's of Sources

    flat    the Pieces, which are leaves; its gradients are the sums
    grads   all gradients of this rank, not summed yet, from the first one on until they are reduced; in stage 1 always;
            by Sources (sources, size)
    """

    grain = BLOCK       # norms are summed per block

    def __init__(self, name, named, grid, stage, policy=AS_IT_IS, leaves=None):
        super().__init__(name, named, grid, stage, policy)
        self.by_source = leaves is not None
        self.leaves = leaves if self.by_source else [s.tensor for s in self.segments]
        self.places = {id(leaf): s for leaf, s in zip(self.leaves, self.segments, strict=True)}
        dtype, device = self.part.dtype, self.pieces[0].device
        self.policy, self.grads_dtype = policy, policy.gradients(dtype)
        self.grads = self._array(self.grads_dtype, device, kept=True) if stage == 1 and not self.by_source else None
        sums = self.grads[self.first:self.first + self.share] if self.grads is not None and self.grads_dtype == dtype \
            else (zeros if self.replicas is None else self.replicas.empty)(self.share, dtype, device)
        for name, s, piece in zip(self.names, self.segments, self.pieces, strict=True):
            leaf = piece.requires_grad_().leaf
            leaf.part_of, leaf.over, leaf.part = s.tensor.leaf.part_of, self.over, s.tensor.leaf.part
            leaf.piece_of = name
        self.flat = Pieces(self.pieces, (self.part, sums))
        self.flat.unit = self
        self.reducing = None        # a Work that is under way
        self.counter = BinaryCounter()
        self.written = set()        # whose gradient lies in `grads`
        self.used = [0] * len(named)    # whether this rank has had a gradient for it in this step
        self.trains = [True] * len(named)   # whether its piece wanted a gradient when the last forward began
        self.wanted = set(self.places)      # ids of leaves whose pieces did when this backward began

    def cut_of(self, tensor):
        """Of a piece: its parameter's (name, shape, how many of its elements each rank has)."""
        s, _ = self.found[id(tensor)]
        name = next(name for name, piece in zip(self.names, self.pieces, strict=True) if piece is tensor)
        ends = [min(max(rank * self.share, s.start), s.stop) for rank in range(self.comm.size + 1)]
        return name, s.tensor.shape, [end - begin for begin, end in pairwise(ends)]

    def count(self):
        """Tell the ledger what is held."""
        super().count()
        keep(self.flat.grads, "gradient")

    # ------------------------------------------------------------ gradients

    def remembered(self):
        """Names of parameters whose gradients lie in `grads`, and that no zero_grad() has come to."""
        return [name for name, leaf, piece in zip(self.names, self.leaves, self.pieces, strict=True)
                if id(leaf) in self.written and piece.requires_grad and id(piece.leaf) not in self.flat.forgotten]

    def follow(self):
        """A forward begins: a parameter whose piece has been frozen since the last one is frozen, and the other way
        round."""
        for i, (s, piece) in enumerate(zip(self.segments, self.pieces, strict=True)):
            if piece.requires_grad != self.trains[i]:
                self.trains[i] = piece.requires_grad
                s.tensor.requires_grad_(piece.requires_grad)

    def expect(self):
        """A backward pass begins."""
        self.wanted = {id(leaf) for leaf, piece in zip(self.leaves, self.pieces, strict=True) if piece.requires_grad}
        self.missing = set(self.wanted)

    def take(self, tensor):
        """A parameter's gradient is complete: add it to those of earlier passes, and take it from the parameter. Where
        its piece has been frozen since forward, it counts for nothing."""
        if id(tensor) not in self.wanted:
            tensor.grad = None
            return
        s, leaf, grad = self.places[id(tensor)], tensor.leaf, tensor.grad
        if grad.requires_grad:
            raise RuntimeError("backward(create_graph=True): the sum over the ranks can't be differentiated again")
        if not self.written:
            self._make_room()
        view = self._view(s, tensor)
        if id(tensor) not in self.written:
            if grad.data is not leaf.grad_view:
                view[...] = grad.data
        elif view.dtype == grad.dtype:
            view += grad.data
        else:
            view[...] = view + grad.data
        wrote(view, "the sum of gradients")
        self.written.add(id(tensor))
        tensor.grad = leaf.grad_view = None
        self.missing.discard(id(tensor))

    def _view(self, segment, leaf):
        return self.grads[..., segment.start:segment.stop].reshape(leaf.shape)

    def _make_room(self):
        if self.grads is None:
            shape = (self.leaves[0].shape[0], self.size) if self.by_source else self.size
            self.grads = zeros(shape, self.grads_dtype, self.flat.device)
        if open_ledgers:
            keep(self.grads, "gradient")
        for s, leaf in zip(self.segments, self.leaves, strict=True):    # what is still to come is written there at once
            leaf.leaf.grad_view = self._view(s, leaf)

    def check_zeroed(self, exact):
        """RuntimeError where a sum stands in the way of the next, or, in exact mode, a gradient of another way."""
        if stale := [name for name, s in zip(self.names, self.flat.segments, strict=True)
                     if (grad := s.tensor.grad) is not None and (exact or grad.data is self.flat.grad_view(s))]:
            raise RuntimeError(f"this backward comes upon gradients of {', '.join(stale[:4])} that are summed over the "
                               "ranks already: call zero_grad() before it, or, to accumulate, run every backward but "
                               "the last inside no_sync()" + exact * (". In exact mode a penalty on parameters() has a "
                               "backward of its own, after the last one of the step"))

    def complete(self):
        """Make `grads` hold this pass's, or all passes' until now: zeros for parameters without one."""
        if self.by_source:
            tensors = [s.tensor for s in self.segments]
            check_by_source(tensors, [t.grad for t in tensors])
        if not self.written:
            self._make_room()
        for i, (s, leaf) in enumerate(zip(self.segments, self.leaves, strict=True)):
            leaf.leaf.grad_view = None
            if id(leaf) in self.written:
                self.used[i] = 1
            else:
                self.grads[..., s.start:s.stop] = 0

    def fold(self):
        """Exact mode: a micro-shard's gradients are a leaf of the tree by themselves."""
        self.complete()
        self.counter.add(self.grads)
        self.empty()

    def reduce(self, exact, folded):
        """Begin to add the gradients up over the ranks, each rank its part. folded: there were micro-shards before.

        All of the unit travels, for what has been frozen since wrapping zeros: a rank gets one block of the whole, and
        all blocks of a reduce-scatter are equally long. A frozen matrix takes away from some ranks' blocks and not from
        others', so that the longest, which sets the length, mostly stays; and few bits, 16 bits and trees over
        the ranks would each have to know which elements a block has. Frozen before wrapping it is a Unit by itself, for
        which nothing is sent here.
        """
        self.complete()
        self.check_zeroed(exact)
        if folded:
            self.counter.add(self.grads)
            self.grads[...] = self.counter.total()
        if self.by_source:
            self.grads = along_tree(self.grads)
        if open_ledgers:
            event("post", self.name)
        with labelled(f"gradients of {self.name}"):
            if self.policy.reduce_encoding is not None:
                self.reducing = SumOfRounded(self.grid, self.flat.grads, self.grads, self.policy.reduce_encoding,
                                             what=self.name)
            elif is_short(self.grads_dtype):
                self.reducing = SumOfShort(self.comm, self.flat.grads, self.grads, what=self.name)
            else:
                self.reducing = self.comm.reduce_scatter(self.flat.grads, self.grads, async_op=True, exact=exact,
                                                         what=self.name)

    def finish(self, exact):
        """The sum over those who share the copy is here: the rank's own gradients go. Begin to add the replicas'."""
        self._wait()
        self.empty()
        if self.replicas is not None:
            with labelled(f"gradients of {self.name}"):
                self.reducing = self.replicas.all_reduce(self.flat.grads, async_op=True, exact=exact, what=self.name)

    def settle(self):
        """Have the sum over all ranks."""
        self._wait()
        wrote(self.flat.grads, "the sum of gradients over the ranks")

    def _wait(self):
        if self.reducing is not None:
            work, self.reducing = self.reducing, None
            work.wait()

    def empty(self):
        """Forget this rank's own gradients."""
        self.written.clear()
        for leaf in self.leaves:
            leaf.leaf.grad_view = None
        if self.stage > 1 or self.by_source:
            self.grads = None

    def hand_out(self, counts):
        """Each piece's gradient is the sum, to which is added what it has got by itself, as of a penalty; None where no
        rank has used the parameter, or the piece is frozen. counts: users of each."""
        for s, users in zip(self.flat.segments, counts, strict=True):
            piece, view = s.tensor, self.flat.grad_view(s)
            if (own := piece.grad) is not None:
                if piece.leaf.hooks or getattr(piece.leaf, "grad_hooks", ()):
                    raise RuntimeError("a hook on one of parameters(), which stands in the loss by itself too, as in a "
                                       "penalty, has seen a part of its gradient: call backward() of the penalty by "
                                       "itself, after that of the loss")
                view += own.data
            piece.grad = Tensor(view) if (users or own is not None) and piece.requires_grad else None
        self.flat.forgotten.clear()
        self.used = [0] * len(self.used)

    def run_hooks(self):
        """Those that users have put on the pieces; all units' gradients are there."""
        for piece in self.pieces:
            if piece.grad is not None:
                summed = piece.grad.data
                changed = run_hooks(piece.node, summed)
                if changed is not summed:
                    summed[...] = changed
                    wrote(summed, "a gradient hook")
                for hook in piece.leaf.hooks or ():
                    hook(piece)

    def forget(self):
        """The step under way counts for nothing. What all ranks have posted is waited for."""
        self._wait()
        self.counter.forget()
        self.used = [0] * len(self.used)
        self.empty()
