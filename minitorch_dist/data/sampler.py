"""Which samples each step trains on: an order that depends on the seed and the epoch, on nothing else."""

import operator

import numpy as np

from .. import backend
from ..backend import whole
from .permutation import Permutation


class Sampler:
    """Cuts a shuffled order of 0 … n−1 into global batches.

    Neither the number of ranks nor the calls made before have a say, so every rank works out the same order by itself
    and a resumed run continues it.

    n           number of samples, ≥ 1
    batch_size  samples per global batch, ≥ 1; the last batch of an epoch has what remains. Or {step: size}, sizes that
                grow in the course of an epoch, where that is the run: {0: 64, 1000: 128, 3000: 256}. (Small ones do as
                long as the gradients of samples agree: McCandlish et al. 2018)
    shuffle     True: another order in every epoch, a list of n numbers. "computed": one of which nothing is kept, each
                place is computed, for data sets too large for a list (permutation.py). False: that of the data set
    drop_last   leave out a last batch that is not full
    Raises ValueError for sizes that leave no batch.
    """

    def __init__(self, n, batch_size, seed=0, shuffle=True, drop_last=False):
        self.n, self.seed = whole("n", n), whole("seed", seed)
        self.batch_size = batch_size if isinstance(batch_size, dict) else whole("batch_size", batch_size)
        self.phases = _phases(batch_size)
        if shuffle not in (True, False, "computed"):
            raise ValueError(f'shuffle={shuffle!r}: expected True, False or "computed"')
        self.shuffle, self.drop_last = shuffle, drop_last
        if self.n < 1:
            raise ValueError(f"A sampler needs at least 1 sample, got n={n}.")
        if len(self) == 0:
            raise ValueError(f"drop_last leaves no batch: batch_size={batch_size} is more than the {n} samples. "
                             f"Take a smaller batch_size or drop_last=False.")

    def __len__(self):
        """Global batches per epoch."""
        left = self.n
        for begin, end, size in self.phases:
            if end is None or left <= (end - begin) * size:
                return begin + (left // size if self.drop_last else -(-left // size))
            left -= (end - begin) * size

    def before(self, step):
        """How many of an epoch's samples stand in the batches before a step."""
        return min(self.n, sum((step if end is None else min(step, end)) * size - begin * size
                               for begin, end, size in self.phases if begin < step))

    def order(self, epoch):
        """int64 (n,): the indices of the whole epoch."""
        return self._places(epoch)(np.arange(self.n))

    def epoch(self, epoch, start=0):
        """Iterate over the epoch's global batches from number `start` on; each an int64 array of indices."""
        places = self._places(epoch)
        return (places(np.arange(self.before(step), self.before(step + 1))) for step in self.steps(start))

    def _places(self, epoch):
        """A function: places of the epoch's order -> the indices that stand there."""
        epoch = operator.index(epoch)       # a stream's key may be text: "1" would be another epoch than 1
        if self.shuffle == "computed":
            return Permutation(self.n, "shuffle", self.seed, epoch)
        return backend.stream("shuffle", self.seed, epoch).permutation(self.n).__getitem__ if self.shuffle else np.array

    def steps(self, start=0):
        """The range of an epoch's steps from `start` on. ValueError where there is no such step."""
        if not 0 <= start <= len(self):
            raise ValueError(f"start={start} is no step of an epoch of {len(self)} batches: expected 0 to {len(self)}.")
        return range(start, len(self))


def _phases(batch_size):
    """[(first step, the one behind the last or None, size)]"""
    given = batch_size if isinstance(batch_size, dict) else {0: batch_size}
    sizes = {whole("a step of batch_size", step): whole("batch_size", size) for step, size in sorted(given.items())}
    if min(sizes.values(), default=0) < 1:
        raise ValueError(f"batch_size counts the samples of a global batch and must be at least 1, got {batch_size}.")
    if min(sizes) != 0:
        raise ValueError(f"batch_size={batch_size}: the first size is that of step 0.")
    steps = [*sizes, None]
    return [(begin, end, size) for begin, end, size in zip(steps, steps[1:], sizes.values(), strict=False)]
