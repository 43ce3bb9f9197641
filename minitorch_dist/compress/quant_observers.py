"""Observers: they look at batches of numbers, and choose the range that a few bits shall cover.

    observer = Percentile(bits=8)
    for batch in batches:
        observer.observe(batch)
    observer.params()               # QuantParams

    minmax      everything that was seen: nothing is cut off, and one outlier makes the steps coarse for all
    average     of the batches' least and greatest, moving: for training, whose ranges move too (Jacob et al. 2018)
    percentile  what lies outside belongs to the most extreme 0.1 %, and is cut off
    mse         the range, shrunk so far that the mean squared error is least (Nagel et al. 2021, 3.1)
"""

from ..autodiff.primitive import lower
from ..backend import xp
from .quantize import SMALLEST, levels_of, params_of_range

SHRUNK = xp.linspace(1.0, 0.05, 96)     # what "mse" tries of a range
BINS = 4096                             # of a histogram, 2048 on each side of 0


def range_of(x, axis=None, what="an observer"):
    """(least, greatest) of x, or of each channel along the axis: float64. ValueError for NaN and infinite values."""
    x = lower(x)
    others = None if axis is None else tuple(i for i in range(x.ndim) if i != axis % x.ndim)
    low, high = x.min(axis=others), x.max(axis=others)
    if not (xp.isfinite(low).all() and xp.isfinite(high).all()):
        raise ValueError(f"{what} was given {int(xp.isnan(x).sum())} NaN and {int(xp.isinf(x).sum())} infinite values "
                         f"of {x.size}: no range holds them. Look for where they come from with mt.detect_anomaly()")
    return low.astype(xp.float64), high.astype(xp.float64)


class MinMax:
    """Everything between the least and the greatest value of all batches; with `axis`, per channel."""

    def __init__(self, bits=8, symmetric=False, axis=None):
        self.bits, self.symmetric, self.axis = bits, symmetric, axis
        self.range = None

    def observe(self, x):
        """Look at a batch; an empty one says nothing."""
        if lower(x).size:
            self.saw(lower(x), *range_of(x, self.axis))

    def saw(self, x, low, high):
        self.range = (low, high) if self.range is None else (
            xp.minimum(self.range[0], low), xp.maximum(self.range[1], high))

    def chosen(self):
        """(low, high) of what shall be covered."""
        return self.range

    def params(self):
        """The QuantParams. ValueError if nothing was observed."""
        if self.range is None:
            raise ValueError(f"{type(self).__name__} has observed nothing: give it at least one batch that isn't empty")
        return params_of_range(*self.chosen(), self.bits, self.symmetric, self.axis)


class MovingAverage(MinMax):
    """The batches' least and greatest values, averaged: each batch moves them by `momentum` of the way."""

    def __init__(self, bits=8, symmetric=False, axis=None, momentum=0.1):
        super().__init__(bits, symmetric, axis)
        self.momentum = momentum

    def saw(self, x, low, high):
        self.range = moved(self.range, (low, high), self.momentum)


def moved(old, new, momentum):
    """The range (low, high) after a batch of the range `new`; old: None before the first."""
    return new if old is None else tuple(o * (1 - momentum) + momentum * n for o, n in zip(old, new, strict=True))


class Histogram(MinMax):
    """How often which values came, in bins that become twice as wide whenever a value lies outside: the memory stays
    the same however many batches. Per tensor only."""

    def __init__(self, bits=8, symmetric=False, axis=None):
        if axis is not None:
            raise ValueError(f"{type(self).__name__} with axis={axis}: a histogram is kept per tensor; per channel "
                             "there is MinMax")
        super().__init__(bits, symmetric)
        self.counts, self.width = xp.zeros(BINS), 0.0

    def saw(self, x, low, high):
        super().saw(x, low, high)
        most = float(max(-low, high))
        if self.width == 0.0 and most:      # a power of two, so that widening is exact
            self.width = max(float(2.0 ** xp.ceil(xp.log2(most))) * 2 / BINS, SMALLEST)
        while most > self.width * BINS / 2:
            pairs = self.counts.reshape(-1, 2).sum(axis=1)
            self.counts = xp.concatenate([xp.zeros(BINS // 4), pairs, xp.zeros(BINS // 4)])
            self.width *= 2
        places = xp.floor(x.reshape(-1) / (self.width or 1.0)).astype(xp.int64) + BINS // 2
        self.counts += xp.bincount(xp.clip(places, 0, BINS - 1), minlength=BINS)

    def centres(self):
        """The value in the middle of each bin."""
        return (xp.arange(BINS) - BINS / 2 + 0.5) * self.width


class Percentile(Histogram):
    """What is left when the most extreme values are cut off: (100 - percentile)/2 % on either side."""

    def __init__(self, bits=8, symmetric=False, axis=None, percentile=99.9):
        super().__init__(bits, symmetric, axis)
        if not 50 < percentile <= 100:
            raise ValueError(f"percentile {percentile}: how many % of the values are to be covered, more than 50")
        self.percentile = percentile

    def chosen(self):
        below = xp.cumsum(self.counts) / self.counts.sum()
        outside = (1 - self.percentile / 100) / 2
        first = xp.searchsorted(below, outside, side="right")
        last = xp.searchsorted(below, 1 - outside - 1e-12)
        edges = (xp.arange(BINS + 1) - BINS / 2) * self.width
        return max(edges[first], self.range[0]), min(edges[last + 1], self.range[1])


class MSE(Histogram):
    """The observed range, shrunk to where the squared error of all values is least."""

    def chosen(self):
        low, high = shrunk(self.centres()[None], *(xp.reshape(side, 1) for side in self.range), self.bits,
                           self.symmetric, self.counts[None])
        return low[0], high[0]


OBSERVERS = {"minmax": MinMax, "average": MovingAverage, "percentile": Percentile, "mse": MSE}


def shrunk(values, low, high, bits, symmetric, counts=1.0):
    """The range of each row of `values` (rows, n), from low to high (rows,), times the one of SHRUNK whose squared
    error is least; counts: how often each value came."""
    best, result = xp.full(len(values), xp.inf), [low, high]
    for factor in SHRUNK:
        params = params_of_range(low * factor, high * factor, bits, symmetric, axis=0)
        scale, zero_point = params.columns(values, xp.float64)
        levels = levels_of(values, scale, zero_point, params.qmin, params.qmax)[1]
        error = (counts * ((levels - zero_point) * scale - values) ** 2).sum(axis=1)
        better = error < best
        best = xp.minimum(best, error)
        result = [xp.where(better, side * factor, old) for side, old in zip((low, high), result, strict=True)]
    return result


def weight_params(weight, bits=8, per_channel=True, observer="minmax"):
    """Symmetric QuantParams of a weight (out, …), per output channel or per tensor; observer "minmax" or "mse"."""
    weight = lower(weight)
    axis = 0 if per_channel else None
    low, high = range_of(weight, axis, "the quantiser of a weight")
    if observer == "mse":
        rows = weight.reshape(len(weight) if per_channel else 1, -1).astype(xp.float64)
        low, high = (side.reshape(low.shape) for side in shrunk(rows, low.reshape(-1), high.reshape(-1), bits, True))
    elif observer != "minmax":
        raise ValueError(f"weights are observed by 'minmax' or 'mse', not by {observer!r}")
    return params_of_range(low, high, bits, True, axis)
