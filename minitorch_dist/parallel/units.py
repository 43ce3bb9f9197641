"""Units: parameters that are gathered, used and freed together, as one flat array that is cut over the ranks.

    whole   |--- w1 ---|pad|- b1 -|pad|------ w2 ------|pad|   padded to ranks · 4,096 elements
    shards  |     rank 0     |     rank 1     |     rank 2     |

A rank's shard is a FlatBuffer, of the pieces of parameters that fall into it: they are what optimizers get. A piece has
as many axes as its parameter, all but the last of length 1, so that what is asked of ndim (which parameters decay) has
the same answer. A parameter of which a rank has nothing has an empty piece there, so that all ranks have all names.
"""

from itertools import pairwise
from typing import NamedTuple

from ..autodiff.primitive import lower
from ..autodiff.reverse import run_hooks
from ..autodiff.tensor import Tensor
from ..autodiff.writes import log, tick, wrote
from ..backend import byte_range, device_of, is_short, module_of, to, to_device_of, xp, zeros, zeros_like
from ..flat import BLOCK, FlatBuffer, layout, round_up
from ..ledger import event, keep, labelled, open_ledgers
from ..nn.absent import Absent, AbsentParameterError
from .exact import BinaryCounter
from .mixed_precision import AS_IT_IS, SumOfShort
from .places import Place, address


class ShardedParameterError(AbsentParameterError):
    """Somebody reads a parameter whose values are cut over the ranks."""


class Elsewhere(Absent):
    """What stands in a parameter's place while its values lie cut over the ranks."""

    error = ShardedParameterError

    def __init__(self, name, shape, dtype, device):
        super().__init__(shape, dtype, device, (
            f"{name} is cut over the ranks, and its values are here during forward only (in stage 3, that of its "
            "unit). Call the fully_shard model, not the module inside; this rank's part is in its named_parameters(), "
            "whole values are in full_state_dict(model), or inside `with model.gathered():`"))


class Kept(NamedTuple):
    """A saved view of a gathered unit: where in it, instead of the view, which would keep all of it alive."""

    unit: object
    place: Place
    date: int

    def view(self):
        """The view again, of the unit's values as they have been gathered anew."""
        self.unit.check_unwritten(self.date)
        return self.place.view(self.unit.whole.view(xp.uint8))


class Unit:
    """Parameters of one dtype that are cut over the ranks as one.

    named   [(name, tensor)]; each tensor's values are kept, its storage is replaced
    grid    the Grid of the ranks (hybrid.py); those that share a copy are `comm`, those with the same part `replicas`,
            those with other shares of experts `over`
    stage   1: the optimizer's state is cut; 2: gradients as well; 3: parameters as well (fully_sharded.py)
    policy  a MixedPrecisionPolicy: the dtypes of whole and grads

    size    elements of the whole, a multiple of ranks · 4,096; each rank has size / ranks of them
    pieces  this rank's pieces of the parameters, leaves, in order; they live in `flat`, a FlatBuffer
    whole   all values, while they are here; always in stages 1 and 2
    grads   all gradients of this rank, not summed yet, from the first one on until they are reduced; in stage 1 always
    users   how many modules that are running want `whole`
    """

    def __init__(self, name, named, grid, stage, policy=AS_IT_IS):
        self.name, self.stage = name, stage
        self.grid, (everyone, self.comm, self.replicas, self.over) = grid, grid
        self.names, tensors = [n for n, _ in named], [t for _, t in named]
        self.segments, used = layout(tensors)
        self.share = round_up(-(-used // self.comm.size), BLOCK)
        self.size, self.first = self.comm.size * self.share, self.comm.rank * self.share
        dtype, device = tensors[0].dtype, tensors[0].device
        if len(devices := {t.device for t in tensors}) > 1:
            raise ValueError(f"fully_shard: {name} lives on {' and '.join(sorted(devices))}: move the model as a "
                             "whole, with model.to(device)")
        self.values_dtype, self.grads_dtype = policy.values(dtype), policy.gradients(dtype)
        self.whole = self._array(dtype, device, kept=stage < 3 and self.values_dtype == dtype)
        for s in self.segments:
            self.whole[s.start:s.stop] = s.tensor.data.reshape(-1)
        everyone.broadcast(self.whole, src=0)
        self.grads = self._array(self.grads_dtype, device, kept=True) if stage == 1 else None
        self._cut()
        if stage < 3 and self.values_dtype != dtype:
            self.whole = self._array(self.values_dtype, device, kept=True)
        self.absent = [Elsewhere(n, t.shape, dtype, device) for n, t in named]
        self.places = {id(s.tensor): s for s in self.segments}
        self.gathering = self.reducing = None       # a Work that is under way
        self.counter, self.users = BinaryCounter(), 0
        self.written = set()        # whose gradient lies in `grads`
        self.used = [0] * len(named)    # whether this rank has had a gradient for it in this step
        self.close()
        self.drop()

    def _array(self, dtype, device, kept):
        """Zeros for the whole: where reductions are fast, if they stay."""
        return (self.comm.empty if kept else zeros)(self.size, dtype, device)

    def _cut(self):
        """Make the pieces, in a FlatBuffer on this rank's part."""
        mine = slice(self.first, self.first + self.share)
        dtype = self.whole.dtype
        values = self.whole[mine] if self.stage < 3 and self.values_dtype == dtype else self.whole[mine].copy()
        grads = self.grads[mine] if self.stage == 1 and self.grads_dtype == dtype else \
            (zeros if self.replicas is None else self.replicas.empty)(self.share, dtype, device_of(values))
        self.pieces, self.found = [], {}
        for s in self.segments:
            start, stop = (min(max(at - self.first, 0), self.share) for at in (s.start, s.stop))
            shape = (1,) * (len(s.tensor.shape) - 1) + (stop - start,) * (len(s.tensor.shape) > 0 or stop - start != 1)
            piece = Tensor(values[start:stop].reshape(shape)).requires_grad_()
            piece.leaf.part_of, piece.leaf.over = s.tensor.leaf.part_of, self.over
            piece.leaf.part = s.tensor.leaf.part
            self.pieces.append(piece)
            self.found[id(piece)] = s, max(self.first - s.start, 0) if stop > start else 0
        self.flat = FlatBuffer(self.pieces, storage=(values, grads))
        self.flat.unit = self

    def piece(self, tensor):
        """Of a piece: (its first element's place in its parameter, the parameter's size, which of the parameter's
        4,096-element blocks are on several ranks)."""
        s, start = self.found[id(tensor)]
        firsts = xp.arange(s.start, s.stop, BLOCK)
        lasts = xp.minimum(firsts + BLOCK, s.stop) - 1
        return start, s.stop - s.start, xp.flatnonzero(firsts // self.share != lasts // self.share)

    def cut_of(self, tensor):
        """Of a piece: its parameter's (name, shape, how many of its elements each rank has)."""
        s, _ = self.found[id(tensor)]
        name = next(name for name, piece in zip(self.names, self.pieces, strict=True) if piece is tensor)
        ends = [min(max(rank * self.share, s.start), s.stop) for rank in range(self.comm.size + 1)]
        return name, s.tensor.shape, [end - begin for begin, end in pairwise(ends)]

    def count(self):
        """Tell the ledger what is held: pieces beside values of other dtypes are what the optimizer has for itself."""
        keep(self.flat.grads, "gradient")
        keep(self.flat.params, "parameter" if self.values_dtype == self.flat.dtype else "optimizer")
        if self.stage < 3:
            keep(self.whole, "parameter")

    # ------------------------------------------------------------ values

    def post_gather(self):
        """Begin to collect the values from all ranks, unless they are here or on the way."""
        if self.whole is None:
            self.whole = module_of(self.flat.params).empty(self.size, self.values_dtype)
            log.forget(self.whole)
            if open_ledgers:
                keep(self.whole, "buffer")
                event("gather", self.name)
            self._post_all_gather()

    def gather(self):
        """Have the values."""
        self.post_gather()
        if self.gathering is not None:
            work, self.gathering = self.gathering, None
            work.wait()
            self.bounds, self.begin = byte_range(self.whole), address(self.whole)

    def post_refresh(self):
        """Begin to collect what the other ranks' optimizers have made of the values, which are here or not."""
        if self.whole is None:
            self.post_gather()
        else:
            self._post_all_gather()

    def _post_all_gather(self):
        mine = self.flat.params
        with labelled(f"parameters of {self.name}"):
            self.gathering = self.comm.all_gather(
                self.whole, mine if self.values_dtype == mine.dtype else mine.astype(self.values_dtype),
                async_op=True, what=self.name)

    def refresh(self):
        """Have the new values."""
        self.gather()
        wrote(self.whole, "the all-gather of parameters")

    def open(self):
        """Give the module its parameters."""
        for s in self.segments:
            values = self.whole[s.start:s.stop].reshape(s.tensor.shape)
            s.tensor.data = values if values.ndim else values.copy()    # the tape keeps numbers as they are

    def close(self):
        """Take them away."""
        for s, absent in zip(self.segments, self.absent, strict=True):
            s.tensor.data = absent

    def drop(self):
        """Stage 3: free the values. What somebody still has a view of lives as long as the view."""
        if self.gathering is not None:
            work, self.gathering = self.gathering, None
            work.wait()
        if self.stage == 3 and self.whole is not None:
            self.whole = None
            if open_ledgers:
                event("free", self.name)

    def holds(self, array):
        """Whether an array lies in the gathered values."""
        here = byte_range(array)
        return here is not None and self.bounds[0] <= here[0] and here[1] <= self.bounds[1]

    def kept(self, array):
        """What to save in the place of an array that lies in the gathered values."""
        return Kept(self, Place.of(array, self.begin), tick())

    def check_unwritten(self, date):
        """RuntimeError if the values aren't those of then."""
        if write := log.since(self.flat.params, date):
            raise RuntimeError(f"backward needs the parameters of {self.name} as they were in forward, but "
                               f"{write[1]} has overwritten them since: call backward() before the write")

    # ------------------------------------------------------------ gradients

    def remembered(self):
        """Names of parameters whose gradients lie in `grads`, and that no zero_grad() has come to."""
        return [name for name, s, piece in zip(self.names, self.segments, self.pieces, strict=True)
                if id(s.tensor) in self.written and piece.requires_grad and id(piece.leaf) not in self.flat.forgotten]

    def expect(self):
        """A backward pass begins."""
        self.missing = set(self.places)

    def take(self, tensor):
        """A parameter's gradient is complete: add it to those of earlier passes, and take it from the parameter."""
        s, leaf, grad = self.places[id(tensor)], tensor.leaf, tensor.grad
        if grad.requires_grad:
            raise RuntimeError("backward(create_graph=True): the sum over the ranks can't be differentiated again")
        if not self.written:
            self._make_room()
        view = self.grads[s.start:s.stop].reshape(tensor.shape)
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

    def _make_room(self):
        if self.grads is None:
            self.grads = zeros(self.size, self.grads_dtype, self.flat.device)
        if open_ledgers:
            keep(self.grads, "gradient")
        for s in self.segments:     # those that are still to come are written there at once
            s.tensor.leaf.grad_view = self.grads[s.start:s.stop].reshape(s.tensor.shape)

    def check_zeroed(self):
        """RuntimeError where a sum stands in the way of the next."""
        if any(piece.grad is not None for piece in self.pieces):
            raise RuntimeError(f"this backward comes upon gradients of {self.name} that are summed over the ranks "
                               "already: call zero_grad() before it, or, to accumulate, run every backward but the "
                               "last inside no_sync()")

    def complete(self):
        """Make `grads` hold this pass's, or all passes' until now: zeros for parameters without one."""
        if not self.written:
            self._make_room()
        for i, s in enumerate(self.segments):
            s.tensor.leaf.grad_view = None
            if id(s.tensor) in self.written:
                self.used[i] = 1
            else:
                self.grads[s.start:s.stop] = 0

    def fold(self):
        """Exact mode: a micro-shard's gradients are a leaf of the tree by themselves."""
        self.complete()
        self.counter.add(self.grads)
        self.empty()

    def reduce(self, exact, folded):
        """Begin to add the gradients up over the ranks, each rank its part. folded: there were micro-shards before."""
        self.complete()
        self.check_zeroed()
        if folded:
            self.counter.add(self.grads)
            self.grads[...] = self.counter.total()
        if open_ledgers:
            event("post", self.name)
        with labelled(f"gradients of {self.name}"):
            if is_short(self.grads_dtype):
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
        for s in self.segments:
            s.tensor.leaf.grad_view = None
        if self.stage > 1:
            self.grads = None

    def hand_out(self, counts):
        """Each piece's gradient is the sum, or None where no rank has used the parameter, or the piece is frozen.
        counts: users of each."""
        for piece, users in zip(self.pieces, counts, strict=True):
            piece.grad = Tensor(piece.leaf.grad_view) if users and piece.requires_grad else None
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

    # ------------------------------------------------------------ from and to one rank

    def collect(self, part):
        """{name: whole array} of all parameters on rank 0, {} elsewhere, from the `part` (of share elements) of each
        rank of its copy."""
        if self.replicas is not None and self.replicas.rank:
            return {}
        out = zeros_like(part, self.size) if self.comm.rank == 0 else None
        self.comm.gather(out, part, dst=0)
        shares = None if out is None else self.grid.gather(out)
        if shares is None:
            return {}
        return {name: xp.array(to(shares[:, s.start:s.stop], "cpu")).reshape(self.grid.whole(s.tensor.shape))
                for name, s in zip(self.names, self.segments, strict=True)}

    def spread(self, values, part):
        """The other way: rank 0 has {name: array}, and each rank's `part` is written."""
        whole, first = None, self.replicas is None or self.replicas.rank == 0
        if first and self.comm.rank == 0:
            whole, shares = zeros_like(part, self.size), None
            if self.over is None or self.over.rank == 0:
                shares = zeros_like(part, (self.grid.shares, self.size))
                for name, s in zip(self.names, self.segments, strict=True):
                    if name in values:
                        shares[:, s.start:s.stop] = to_device_of(lower(values[name]).reshape(len(shares), -1), shares)
            self.grid.scatter(whole, shares)
        if first:
            self.comm.scatter(part, whole, src=0)
        if self.replicas is not None:
            self.replicas.broadcast(part, src=0)
