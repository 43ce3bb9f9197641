"""Image augmentation whose random numbers belong to the sample, not to the rank or the order.

The draw for a sample is keyed by (seed, epoch, the sample's number in the data set): on any number of ranks, and after
a resumed run, the same image is shifted the same way.
"""

import numpy as np

from ..backend import stream


class RandomShift:
    """Shift square images by up to `reach` pixels each way, filling with the image's own corner value.

    __call__(images (n, side²), indices (n,), epoch) -> a new array of the same shape and dtype.
    """

    def __init__(self, count, side=28, reach=2, seed=0):
        if not 0 <= reach < side:
            raise ValueError(f"RandomShift: reach {reach} for images of {side} pixels a side")
        self.count, self.side, self.reach, self.seed = count, side, reach, seed
        self._epoch, self._shifts = None, None

    def shifts(self, epoch):
        """(count, 2) int64: the shift of every sample of the data set in this epoch, down and to the right."""
        if epoch != self._epoch:
            # One draw for all samples: row i belongs to sample i whoever asks.
            draws = stream("augment", self.seed, epoch).integers(-self.reach, self.reach + 1, (self.count, 2))
            self._epoch, self._shifts = epoch, draws
        return self._shifts

    def __call__(self, images, indices, epoch):
        side, reach = self.side, self.reach
        square = images.reshape(-1, side, side)
        padded = np.empty((len(square), side + 2 * reach, side + 2 * reach), images.dtype)
        padded[...] = square[:, :1, :1]
        padded[:, reach:reach + side, reach:reach + side] = square
        starts = reach - self.shifts(epoch)[indices]
        rows = starts[:, 0, None] + np.arange(side)
        columns = starts[:, 1, None] + np.arange(side)
        shifted = padded[np.arange(len(square))[:, None, None], rows[:, :, None], columns[:, None, :]]
        return np.ascontiguousarray(shifted).reshape(images.shape)
