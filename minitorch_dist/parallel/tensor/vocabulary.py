"""Losses of logits whose classes the ranks of a group share: what tensor parallelism of an output layer leaves.

    logits of this rank's classes z_r     largest m = max over ranks     Σ exp(z_r - m), z[label]: sums over ranks
    losses log Σ exp(z - m) + m - z[label], on all ranks; backward sends nothing

So three numbers per label are sent, and logits of all classes never come together; by tiles (linear_cross_entropy)
those of a rank don't, either. Source: Shoeybi et al. 2019, "Megatron-LM".
"""

from typing import NamedTuple

from ...autodiff import ops
from ...autodiff.ops.indexing import check_numbers
from ...autodiff.primitive import lower
from ...backend import choose, is_short, to_device_of, xp
from ...backend.tiled_cross_entropy import counted_labels
from ...data.loader import share
from ...nn.loss import by_labels, smoothing, weighted, with_more
from ..collectives import reduce_from


def here(numbers, count, comm):
    """(whether each number of 0 … count - 1 is in this rank's share, its place there; 0 for others)."""
    lo, hi = share(count, comm.rank, comm.size)
    numbers = numbers.astype(xp.int64)      # a byte has no place for lo
    mine = (lo <= numbers) & (numbers < hi)
    return mine, xp.where(mine, numbers - lo, 0)


class Shares(NamedTuple):
    """Classes that the ranks of a group share in order: for ops.linear_cross_entropy, whose `weight` is a rank's rows.
    x and labels must be the same on all ranks, and the losses are; cotangents of x are each rank's own."""

    comm: object
    classes: int

    def here(self, labels):
        """Labels from this rank's first class on, -1 where they are others'."""
        mine, place = here(labels, self.classes, self.comm)
        return xp.where(mine, place, -1)

    def together(self, largest, total, right, labels):
        """(m, Σ exp(z - m), z[label]) of all classes, from those of this rank's and labels as `here` gives them."""
        most = largest.copy()
        self.comm.all_reduce(most, "max")
        sums = xp.stack([total * xp.exp(largest - most), choose(labels >= 0, right, 0.0)])
        self.comm.all_reduce(sums)
        return most, sums[0].copy(), sums[1]        # the first is kept, and a view would keep both

    def losses(self, logits, labels, ignore=None, label_smoothing=0.0, z_loss=0.0):
        """(n,), float32 at least, of this rank's logits (n, its share) and labels (n,); 0 where the label is
        `ignore`."""
        counted, labels = counted_labels(labels, ignore)
        if is_short(logits.dtype):      # sums of exponentials
            logits = logits.astype(xp.float32)
        greatest = lower(logits).max(-1)
        self.comm.all_reduce(greatest, "max")       # a constant: what is subtracted doesn't change the loss
        z = logits - greatest[:, None]
        mine, place = here(labels, self.classes, self.comm)
        picked = ops.reshape(ops.take_along_axis(z, place[:, None], 1), labels.shape)
        total = reduce_from(ops.sum(ops.exp(z), 1), self.comm)
        right = ops.where(mine, picked, 0.0)
        if label_smoothing:
            right = right * (1.0 - label_smoothing) + ops.sum(z, 1) * (label_smoothing / self.classes)
        total = ops.log(total)
        losses = total - reduce_from(right, self.comm)
        if z_loss:
            losses = losses + ops.square(total + greatest) * z_loss
        return losses if counted is None else ops.where(counted, losses, 0.0)

    def linear_losses(self, x, weight, labels, ignore=None, z_loss=0.0):
        """(n,), of x Wᵀ as logits, which aren't made: x (n, in), this rank's rows of W, labels (n,); 0 where the label
        is `ignore`."""
        def tiled(x, labels, ignore):
            return ops.linear_cross_entropy(x, weight, labels, ignore, self)

        def of_labels(x, labels):
            mine, row = here(labels, self.classes, self.comm)
            return reduce_from(ops.where(mine, ops.sum(x * weight[row], 1), 0.0), self.comm)
        return with_more(tiled, of_labels, None, 0.0, z_loss)(x, labels, ignore)


def vocab_parallel_cross_entropy(logits, labels, comm, num_classes, reduction="mean", ignore_index=-100,
                                 label_smoothing=0.0, z_loss=0.0):
    """nn.cross_entropy of logits whose last axis is divided, without bringing them together.

    logits (…, this rank's share of num_classes), labels (…) integers, the same on all ranks -> the mean loss of those
    that count, the "sum", or with "none" (…), on all ranks. Each sends three numbers per label forward and none
    backward. Of logits in 16 bits the losses are float32. label_smoothing and z_loss as in nn.cross_entropy.
    """
    shares, more = Shares(comm, num_classes), (smoothing(label_smoothing), weighted(z_loss))

    def losses(logits, labels, ignore=None):
        labels = to_device_of(labels, lower(logits))
        check_numbers("vocab_parallel_cross_entropy", labels, num_classes, "labels", "classes", ignore)
        return shares.losses(logits, labels, ignore, *more)
    return by_labels(losses, logits, labels, reduction, ignore_index, lambda shapes: "vocab_parallel_cross_entropy: "
                     f"logits {shapes}: they must be (…, this rank's share of {num_classes}), (…)")

