"""Units: parameters that are gathered, used and freed together, as one flat array that is cut over the ranks.

    whole   |--- w1 ---|pad|- b1 -|pad|------ w2 ------|pad|   padded: all shards are equally long
    shards  |     rank 0     |     rank 1     |     rank 2     |

A rank's shard has the pieces of parameters that fall into it. A piece has as many axes as its parameter, all but the
last of length 1, so that what is asked of ndim (which parameters decay) has the same answer. A parameter of which a
rank has nothing has an empty piece there, so that all ranks have all names. Frozen parameters are units of their own;
those that are trained have gradients as well, and optimizers get their pieces (trained_units.py).
"""

from typing import NamedTuple

from ...autodiff.primitive import lower
from ...autodiff.tensor import Tensor
from ...autodiff.writes import log, tick, wrote
from ...backend import byte_range, module_of, to, to_device_of, xp, zeros, zeros_like
from ...flat import ALIGN, layout, round_up
from ...ledger import event, keep, labelled, open_ledgers
from ...nn.absent import Absent, AbsentParameterError, will_come_and_go
from ..places import Place, address
from .few_bits import decoded, encoded
from .mixed_precision import AS_IT_IS


class ShardedParameterError(AbsentParameterError):
    """Somebody reads a parameter whose values are cut over the ranks."""


class Elsewhere(Absent):
    """What stands in a parameter's place while its values lie cut over the ranks."""

    error = ShardedParameterError

    def __init__(self, name, shape, dtype, device):
        super().__init__(shape, dtype, device, (
            f"{name} is cut over the ranks, and its values are here during forward only (in stage 3, that of its "
            "unit). Call the fully_shard model, not the module inside; this rank's part is in its named_parameters(), "
            "whole values are in full_state_dict(model), or inside `with model.gathered():`, which mt.grad and "
            "its like around the model need in stage 3, too"))


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
    """Parameters of one dtype that are cut over the ranks as one: their values. Frozen ones have no more.

    named   [(name, tensor)]; each tensor's values are kept, its storage is replaced
    grid    the Grid of the ranks (hybrid.py); those that share a copy are `comm`, those with the same part `replicas`,
            those with other shares of experts `over`, neighbours that keep the values from forward to backward `near`
    stage   3: the values are cut; 1, 2: they are here as well (fully_sharded.py)
    policy  a MixedPrecisionPolicy: the dtype of whole

    size    elements of the whole; each rank has size / ranks of them, a multiple of `grain`
    part    those of this rank, and pieces: what they are of each parameter, in order
    whole   all values, while they are here; always in stages 1 and 2
    second  what this rank keeps of them for its neighbours, as it travels; None: they come from all ranks
    users   how many modules that are running want `whole`
    """

    grain = ALIGN

    def __init__(self, name, named, grid, stage=3, policy=AS_IT_IS):
        self.name, self.stage = name, stage
        self.grid = grid
        everyone, self.comm, self.replicas, self.over, near = grid
        self.near, self.second = near and near.shards, None
        self.names, tensors = [n for n, _ in named], [t for _, t in named]
        self.segments, _ = layout(tensors)
        self.share = round_up(-(-max(self.segments[-1].end, 1) // self.comm.size), self.grain)
        self.size, self.first = self.comm.size * self.share, self.comm.rank * self.share
        dtype, device = tensors[0].dtype, tensors[0].device
        if len(devices := {t.device for t in tensors}) > 1:
            raise ValueError(f"fully_shard: {name} lives on {' and '.join(sorted(devices))}: move the model as a "
                             "whole, with model.to(device)")
        self.values_dtype, self.encoding = policy.values(dtype), policy.param_encoding
        self.whole = self._array(dtype, device, kept=stage < 3 and self.values_dtype == dtype)
        for s in self.segments:
            self.whole[s.start:s.stop] = s.tensor.data.reshape(-1)
        everyone.broadcast(self.whole, src=0)
        self._cut()
        if stage < 3 and self.values_dtype != dtype:
            self.whole = self._array(self.values_dtype, device, kept=True)
        self.absent = [Elsewhere(n, t.shape, dtype, device) for n, t in named]
        self.gathering = self.arriving = None       # a Work that is under way; what it writes to
        self.views = None       # of `whole`, one per parameter, since they were wanted first
        self.users = 0
        for tensor in tensors if stage == 3 else ():
            will_come_and_go(tensor)
        self.close()
        self.drop()

    def __reduce_ex__(self, protocol):
        raise TypeError("an optimizer of a fully_shard model's parameters can't be copied or pickled: they are this "
                        "rank's pieces. Save full_optimizer_state_dict(model, optimizer)")

    def _array(self, dtype, device, kept):
        """Zeros for the whole: where reductions are fast, if they stay."""
        return (self.comm.empty if kept else zeros)(self.size, dtype, device)

    def _cut(self):
        """Make the pieces."""
        mine = self.whole[self.first:self.first + self.share]
        self.part = mine if self.stage < 3 and self.values_dtype == mine.dtype else mine.copy()
        self.pieces, self.found = [], {}
        for s in self.segments:
            start, stop = (min(max(at - self.first, 0), self.share) for at in (s.start, s.stop))
            shape = (1,) * (len(s.tensor.shape) - 1) + (stop - start,) * (len(s.tensor.shape) > 0 or stop - start != 1)
            piece = Tensor(self.part[start:stop].reshape(shape))
            if (leaf := s.tensor.leaf) is not None:     # then it is one as well, for what writes in place, say p *= 0.5
                piece.requires_grad_().requires_grad_(False)
                piece.leaf.tied = leaf.tied
            self.pieces.append(piece)
            self.found[id(piece)] = s, max(self.first - s.start, 0) if stop > start else 0

    def piece(self, tensor):
        """Of a piece: (its first element's place in its parameter, the parameter's size, the places at which the next
        rank's piece begins)."""
        s, start = self.found[id(tensor)]
        ends = range(s.start // self.share + 1, -(-s.stop // self.share))
        return start, s.stop - s.start, [rank * self.share - s.start for rank in ends]

    def shape_of(self, tensor):
        """Of a piece: its parameter's shape."""
        return self.found[id(tensor)][0].tensor.shape

    def count(self):
        """Tell the ledger what is held: pieces beside values of other dtypes are what the optimizer has for itself."""
        keep(self.part, "parameter" if self.values_dtype == self.part.dtype else "optimizer")
        if self.stage < 3:
            keep(self.whole, "parameter")

    # ------------------------------------------------------------ values

    def post_gather(self):
        """Begin to collect the values from all ranks, unless they are here or on the way."""
        if self.whole is None:
            self.whole = module_of(self.part).empty(self.size, self.values_dtype)
            log.forget(self.whole)
            if open_ledgers:
                keep(self.whole, "buffer")
                event("gather", self.name)
            self._post_all_gather()

    def gather(self, keep_second=False):
        """Have the values. keep_second: and keep this rank's part of them for its neighbours, until let_go()."""
        self.post_gather()
        if self.gathering is not None:
            arrived = self._wait_for_values()
            if self.encoding is not None:
                for values, row in zip(self.whole.reshape(self.comm.size, -1), arrived.reshape(self.comm.size, -1),
                                       strict=True):
                    values[...] = decoded(self.encoding, row, self.share)
            self.bounds, self.begin = byte_range(self.whole), address(self.whole)
            if keep_second and self.near is not None and self.second is None:
                self.second = arrived.reshape(self.near.size, -1)[self.near.rank].copy()
                keep(self.second, "buffer")

    def _wait_for_values(self):
        """What has come from the others."""
        work, arrived, self.gathering, self.arriving = self.gathering, self.arriving, None, None
        work.wait()
        return arrived

    def let_go(self):
        """The values may be others now: the next gather is from all ranks."""
        self.second = None

    def post_refresh(self):
        """Begin to collect what the other ranks' optimizers have made of the values, which are here or not."""
        if self.whole is None:
            self.post_gather()
        else:
            self._post_all_gather()

    def _post_all_gather(self):
        comm, mine, self.arriving = self.comm, self.second, self.whole
        if mine is not None:
            comm = self.near
        elif self.encoding is None:
            mine = self.part.astype(self.values_dtype, copy=False)
        else:
            mine = encoded(self.encoding, self.part)
        if self.encoding is not None:
            self.arriving = module_of(mine).empty(comm.size * mine.size, mine.dtype)
            keep(self.arriving, "buffer")
        with labelled(f"parameters of {self.name}"):
            self.gathering = comm.all_gather(self.arriving, mine, async_op=True, what=self.name)

    def refresh(self):
        """Have the new values."""
        self.gather()
        wrote(self.whole, "the all-gather of parameters")

    def open(self):
        """Give the module its parameters: the same arrays each time, as long as the values stay where they are."""
        if self.views is None:
            self.views = [self.whole[s.start:s.stop].reshape(s.tensor.shape) for s in self.segments]
        for s, values in zip(self.segments, self.views, strict=True):   # 0-d ones the tape keeps as they are: a copy
            s.tensor.data = values if values.ndim or self.stage < 3 else values.copy()

    def close(self):
        """Take them away."""
        for s, absent in zip(self.segments, self.absent, strict=True):
            s.tensor.data = absent

    def drop(self):
        """Stage 3: free the values. What somebody still has a view of lives as long as the view."""
        if self.gathering is not None:
            self._wait_for_values()
        if self.stage == 3 and self.whole is not None:
            self.whole = self.views = None
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
        if write := log.since(self.part, date):
            raise RuntimeError(f"backward needs the parameters of {self.name} as they were in forward, but "
                               f"{write[1]} has overwritten them since: call backward() before the write")

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
