"""A rank's share of every global batch."""

from dataclasses import dataclass, fields, replace

import numpy as np

from ..backend import to, whole
from .sampler import Sampler


@dataclass(frozen=True)
class Shard:
    """Rows [lo, hi) of the global batch, which is shard number `index` of it. May have no row at all. Who needs more of
    each row than inputs and labels derives a class with more arrays (parallel/rollouts.py)."""

    index: int
    inputs: np.ndarray
    labels: np.ndarray
    rows: tuple

    def to(self, device):
        """The same rows on a device; itself, where they are there already."""
        if device == "cpu":
            return self
        return replace(self, **{name: to(array, device) for name, array in self.arrays().items()})

    def arrays(self):
        """{name: array} of what has one entry per row."""
        found = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in ("index", "rows")}
        return {name: array for name, array in found.items() if array is not None}


@dataclass(frozen=True)
class Batch:
    """One rank's part of a global batch.

    inputs, labels   this rank's rows, C-contiguous copies; none if the batch is smaller than the number of ranks
    count            number of samples of the GLOBAL batch: divide sums by this, and never mean a mean
    rows             (lo, hi): which rows of the global batch these are
    shards           the same rows again as a list of Shard, in order, as views
    """

    inputs: np.ndarray
    labels: np.ndarray
    count: int
    rows: tuple
    shards: list

    def __iter__(self):
        raise TypeError("a Batch is no pair: it has batch.inputs, batch.labels, and batch.count, which counts the "
                        "samples of all ranks")


def share(count, part, parts):
    """(lo, hi): the rows of `count` that fall to `part` of `parts`. Disjoint, complete, even to one row."""
    return count * part // parts, count * (part + 1) // parts


def cut(shard, pieces):
    """A Shard in so many of the same kind, one after another; some may have no row."""
    if pieces == 1:
        return [shard]
    (first, last), parts = shard.rows, []
    for i in range(pieces):
        lo, hi = share(last - first, i, pieces)
        parts.append(replace(shard, rows=(first + lo, first + hi),
                             **{name: array[lo:hi] for name, array in shard.arrays().items()}))
    return parts


class Arrays:
    """Inputs and labels in memory, one sample per first index, as a data set. TypeError or ValueError where they don't
    fit together."""

    def __init__(self, images, labels):
        for name, array in (("images", images), ("labels", labels)):
            if not getattr(array, "shape", ()):
                raise TypeError(f"{name}: a Loader cuts arrays of one sample per first index, got "
                                f"{type(array).__name__}.")
        if len(images) != len(labels):
            raise ValueError(f"images and labels must be equally many, got {len(images)} and {len(labels)}.")
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.images)

    def read(self, indices):
        """(inputs, labels) of these samples: copies."""
        return self.images[indices], self.labels[indices]


class Loader:
    """Cuts each global batch by rank, and each rank's part by micro-shard.

        global batch, 13 rows      0  1  2  3  4  5  6  7  8  9 10 11 12
        size=2                     rank 0 ─────────┤ rank 1 ──────────┤
        micro_shards=4             0 ─────┤ 1 ─────┤ 2 ─────┤ 3 ──────┤     each cut rounded down

    images, labels   arrays with one sample per first index, equally many. Or a data set, and None: what has a length,
                     and read(indices) -> (inputs, labels) of these samples (Arrays, StoredTokens, Mixture)
    batch_size       samples per GLOBAL batch; or {step: size}, see Sampler
    rank, size       of this process among all that share a batch. Data parallel ranks that aren't told apart have all
                     rows each, and sums over the ranks count each row N times
    micro_shards     1: a rank's rows are one shard, with the rank's number. V, a multiple of size: the global batch is
                     cut into V shards, the same ones for every size, of which each rank has V/size (see exact mode)
    seed, shuffle, drop_last   see Sampler
    augment          None, or augment(images, indices in the data set, epoch) -> images (see augment.py)
    parts            None, or parts(rank, epoch) -> an index array per global batch: that rank's rows, in place of the
                     Sampler's order and the even cut; with micro_shards=1
    Raises ValueError where these don't fit together.
    """

    def __init__(self, images, labels, batch_size, seed=0, rank=0, size=1, micro_shards=1, shuffle=True,
                 drop_last=False, augment=None, parts=None):
        data = images if labels is None and hasattr(images, "read") else Arrays(images, labels)
        micro_shards = whole("micro_shards", micro_shards)
        if not 0 <= rank < size:
            raise ValueError(f"rank={rank} is none of the ranks 0 to size−1 with size={size}.")
        if micro_shards < 1 or (micro_shards > 1 and micro_shards % size):
            raise ValueError(f"micro_shards={micro_shards} can't be dealt evenly to size={size} ranks: take 1 or a "
                             f"multiple of {size}, or another number of ranks.")
        self.sampler = Sampler(len(data), batch_size, seed, shuffle, drop_last)
        if min(phase[2] for phase in self.sampler.phases) < size:
            raise ValueError(f"batch_size={batch_size} counts the samples of all ranks together; with size={size} some "
                             f"rank would never get one. Take a batch_size of at least {size}, or fewer ranks.")
        if parts is not None and micro_shards > 1:
            raise ValueError(f"parts decides on whole ranks' rows, and micro_shards={micro_shards} on pieces of them: "
                             "take one of the two.")
        self.data, self.augment, self.parts = data, augment, parts
        self.rank, self.size = rank, size
        shards_each, first = (1, rank) if micro_shards == 1 else (micro_shards // size, rank * micro_shards // size)
        self.shard_indices, self.shards_total = range(first, first + shards_each), max(micro_shards, size)

    def __len__(self):
        """Global batches per epoch."""
        return len(self.sampler)

    def __iter__(self):
        raise TypeError("a Loader's order depends on its seed and the epoch: for batch in loader.epoch(number)")

    def epoch(self, epoch, start=0):
        """Iterate over the epoch's batches, from step `start` on: a resumed run gets what the first would have got."""
        if self.parts is not None:
            return self._given(epoch, self.sampler.steps(start))
        return (self._batch(indices, epoch) for indices in self.sampler.epoch(epoch, start))

    def _given(self, epoch, steps):
        of_ranks = [self.parts(rank, epoch) for rank in range(self.size)]
        if any(len(parts) != len(self) for parts in of_ranks):
            raise ValueError(f"parts gave the ranks {[len(parts) for parts in of_ranks]} batches in epoch {epoch}, and "
                             f"the epoch has {len(self)}.")
        for step in steps:
            ends = np.cumsum([0, *(len(parts[step]) for parts in of_ranks)]).tolist()
            if not ends[-1]:
                raise ValueError(f"parts left batch {step} of epoch {epoch} without a sample on any rank.")
            inputs, labels = self._rows(of_ranks[self.rank][step], epoch)
            rows = ends[self.rank], ends[self.rank + 1]
            yield Batch(inputs, labels, ends[-1], rows, [Shard(self.rank, inputs, labels, rows)])

    def _rows(self, indices, epoch):
        inputs, labels = self.data.read(indices)
        return (inputs if self.augment is None else self.augment(inputs, indices, epoch)), labels

    def _batch(self, indices, epoch):
        count = len(indices)
        lo, hi = share(count, self.rank, self.size)
        inputs, labels = self._rows(indices[lo:hi], epoch)
        shards = [self._shard(i, inputs, labels, lo, count) for i in self.shard_indices]
        return Batch(inputs, labels, count, (lo, hi), shards)

    def _shard(self, index, inputs, labels, offset, count):
        lo, hi = share(count, index, self.shards_total)
        here = slice(lo - offset, hi - offset)
        return Shard(index, inputs[here], labels[here], (lo, hi))
