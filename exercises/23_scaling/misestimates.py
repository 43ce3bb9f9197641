"""The known mistakes of 23.2."""

import math

import numpy as np

from exercises.frame import gives, when
from exercises.frame.comparing import same

from .noises import Averages, estimate, of_averages, run, square, variance


def ratio(a, b):
    """A quotient as NumPy has it."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.divide(a, b))


class Swapped(Averages):
    def mixed(self, old, new):
        return self.decay * new + (1 - self.decay) * old


class Equal(Averages):
    """All steps weigh alike."""

    count = 0

    def take(self, trace, square):
        self.count += 1
        self.trace += (trace - self.trace) / self.count
        self.square += (square - self.square) / self.count


class Latest(Averages):
    def take(self, trace, square):
        self.trace, self.square = trace, square


class FromFirst(Averages):
    """Both begin with what the first step gives."""

    first = True

    def take(self, trace, square):
        if self.first:
            self.trace, self.square, self.first = trace, square, False
        else:
            super().take(trace, square)


class Ratios(Averages):
    """The average of the steps' own scales."""

    def take(self, trace, square):
        self.trace = self.mixed(self.trace, of_averages(trace, square))

    def scale(self):
        return self.trace or math.nan


class PlainRatios(Ratios):
    def take(self, trace, square):
        self.trace = self.mixed(self.trace, ratio(trace, square))


class NewSquare(Averages):
    def take(self, trace, square):
        self.trace, self.square = self.mixed(self.trace, trace), square


class NewTrace(Averages):
    def take(self, trace, square):
        self.trace, self.square = trace, self.mixed(self.square, square)


class BelowZero(Averages):
    def scale(self):
        return ratio(self.trace, self.square)


class Zero(Averages):
    """0 where |G|² isn't above 0."""

    def scale(self):
        return math.nan if self.trace == self.square == 0 else self.trace / self.square if self.square > 0 else 0.0


class Nan(Averages):
    """nan wherever |G|² is 0."""

    def scale(self):
        return math.nan if self.square == 0 else of_averages(self.trace, self.square)


class Size(Averages):
    def scale(self):
        return ratio(self.trace, abs(self.square))


class Inverse(Averages):
    def scale(self):
        return ratio(self.square, self.trace) if self.square > 0 else math.inf if self.trace else math.nan


class Root(Averages):
    def scale(self):
        return self.trace / math.sqrt(self.square) if self.square > 0 else math.inf if self.trace else math.nan


class Positive(Averages):
    """What is below 0 is taken for 0."""

    def take(self, trace, square):
        super().take(trace, max(square, 0.0))


class Skips(Averages):
    def take(self, trace, square):
        if square > 0:
            super().take(trace, square)


def by(trace, least=2):
    """A mistake in tr(Σ)."""
    def find(step):
        return estimate(step, trace) if step.k >= least else None
    return find


def over(count):
    """Divided by another number."""
    def trace(step):
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.float64(variance(step) * (step.k - 1)) / count(step)
    return by(trace)


def of_equal(step):
    """The paper's, for shards of N/k samples each."""
    return (step.sizes.mean() - square(step.whole)) / (step.k / step.N - 1 / step.N)


def of_first(step):
    """The paper's, with the first shard's n, or its own, for all."""
    return (step.sizes.mean() - square(step.whole)) / (1 / step.n.mean() - 1 / step.N)


def harmonic(step):
    """Unbiased as well, of unweighted squares; but not the estimate that varies least."""
    return (step.sizes.mean() - square(step.whole)) / ((1 / step.n).mean() - 1 / step.N)


def unweighted_mean(step):
    """The mean of means in the place of m."""
    other = sum(step.m) / step.k
    return sum(n * square(m - other) for m, n in zip(step.m, step.n, strict=True)) / (step.k - 1)


def merged(step):
    """Each rank's shards put together first, as if it had made one backward."""
    own = [step.only(lambda rank, r=r: rank == r) for r in range(step.ranks)]
    own = [part for part in own if part.k]
    if len(own) < 2:
        return None
    trace = sum(part.N * square(part.whole - step.whole) for part in own) / (len(own) - 1)
    return trace, square(step.whole) - trace / step.N


def alone(step):
    """What a rank makes of its own shards."""
    own = step.only(lambda rank: rank == step.rank)
    if own.k < 2:
        return None
    trace = (own.n @ own.sizes - own.N * square(step.whole)) / (own.k - 1)
    return trace, square(step.whole) - trace / own.N


def local_samples(step):
    """N is this rank's in the end."""
    own = step.only(lambda rank: rank == step.rank)
    if step.k < 2:
        return None
    trace = (step.n @ step.sizes - own.N * square(step.whole)) / (step.k - 1)
    return trace, square(step.whole) - ratio(trace, own.N)


def averaged(step):
    """The three sums, divided by the number of ranks."""
    if step.k / step.ranks < 2:
        return None
    n, k = step.N / step.ranks, step.k / step.ranks
    trace = (step.n @ step.sizes / step.ranks - n * square(step.whole)) / (k - 1)
    return trace, square(step.whole) - trace / n


def ranks_times(step):
    """|m|² summed over the ranks."""
    if step.k < 2:
        return None
    size = step.ranks * square(step.whole)
    trace = (step.n @ step.sizes - step.N * size) / (step.k - 1)
    return trace, size - trace / step.N


def at_rank_0(step):
    return estimate(step) if step.rank == 0 else None


def with_empty(step):
    """Those without samples are counted as well."""
    if step.k + step.empty < 2:
        return None
    trace = (step.n @ step.sizes - step.N * square(step.whole)) / (step.k + step.empty - 1)
    return trace, square(step.whole) - trace / step.N


def moving(step):
    """Those whose gradient is 0 are left out."""
    some = step.sizes > 0
    if some.sum() < 2:
        return None
    samples = step.n[some].sum()
    trace = (step.n @ step.sizes - samples * square(step.whole)) / (some.sum() - 1)
    return trace, square(step.whole) - trace / samples


def zeros(step):
    return estimate(step) if step.k >= 2 else (0.0, 0.0)


def more_than_ranks(step):
    """As if there were one shard per rank."""
    return over(lambda step: step.ranks - 1)(step)


def flipped(step):
    found = estimate(step)
    return found and found[::-1]


def e(text, find):
    return gives("update: " + text, lambda case: run(case, find))


def a(text, averages):
    return gives("the averages: " + text, lambda case: run(case, averages=averages))


def of_one(case, got):
    """Whether there are estimates of a step in which nothing can be compared."""
    return any(one is not None and other is None for rank, right in zip(got, run(case), strict=True)
               for of, theirs in zip(rank["estimates"], right["estimates"], strict=True)
               for one, other in zip(of, theirs, strict=True))


def near(case, got, tolerance=1e-4):
    """Whether the steps' estimates are, whatever became of them in the averages."""
    return all(same(one, other, tolerance) for rank, right in zip(got, run(case), strict=True)
               for of, theirs in zip(rank["estimates"], right["estimates"], strict=True)
               for one, other in zip(of, theirs, strict=True) if other is not None)


SIGNATURES = [
    when("a gradient isn't what it was before the call: work on a copy",
         lambda case, got: any(rank["changed"] for rank in got)),
    when("scale() isn't nan before an object's first step. If it is what another object has seen, keep them on the "
         "object, not on the class", lambda case, got: case[0]["what"] == "steps" and any(
             not math.isnan(scales[0]) for rank in got for scales in rank["scales"])),
    a("the steps' own ratios are averaged. A ratio of noisy numbers is biased, and a single |G|² near 0 spoils all: "
      "average tr(Σ), average |G|², then divide", Ratios),
    a("the steps' own ratios are averaged. A ratio of noisy numbers is biased, and a single |G|² near 0 spoils all: "
      "average tr(Σ), average |G|², then divide", PlainRatios),
    a("decay and 1 - decay have changed places: what was known before weighs decay", Swapped),
    a("they begin with the first step's estimates, which then weigh 1/(1 - decay) times as much as the next ones: from "
      "0 on", FromFirst),
    a("all steps weigh alike: the scale grows during training, and what is long ago must be forgotten", Equal),
    a("the last step's ratio: it is far too noisy, average tr(Σ) and |G|² over steps", Latest),
    a("|G|² is the last step's: it is the noisier of the two, and wants an average as well", NewSquare),
    a("tr(Σ) is the last step's: it wants an average as well", NewTrace),
    a("where the average of |G|² isn't above 0, B_simple is inf: nothing can be told from noise yet", BelowZero),
    a("where the average of |G|² isn't above 0, B_simple is inf, not 0: the noise is all there is", Zero),
    a("where the average of |G|² isn't above 0, B_simple is inf: below 0 it isn't a size", Size),
    a("where the average of |G|² is 0, B_simple is inf: it is nan before any step alone", Nan),
    a("the wrong way round: B_simple is tr(Σ)/|G|²", Inverse),
    a("divided by |G|, not by |G|²", Root),
    a("estimates of |G|² below 0 are taken for 0: then the average is too large. Noise must go both ways to cancel",
      Positive),
    a("steps with an estimate of |G|² below 0 are left out: then the average is too large. Noise must go both ways to "
      "cancel", Skips),
    e("|G|² comes first, and then tr(Σ): the two are asked for the other way round", flipped),
    e("divided by k: of k shards around their own mean, k - 1 differences are free. N |m|² has one tr(Σ) in it",
      over(lambda step: step.k)),
    e("divided by the ranks less 1: a rank may have several shards, or none; count the shards",
      more_than_ranks),
    e("divided by the samples less 1: there are as many gradients as shards, k", over(lambda step: step.N - 1)),
    e("the difference isn't divided by k - 1", over(lambda step: 1)),
    e("tr(Σ) is divided by N as well: asked for is the variance of one sample's gradient, not of the batch's",
      lambda step: estimate(step, lambda step: variance(step) / step.N, lambda step, trace: trace)),
    e("the mean over the gradient's elements: a trace is their sum", lambda step: (found := estimate(step)) and tuple(
        x / len(step.whole) for x in found)),
    e("shards without samples are counted: they say nothing", with_empty),
    e("a shard with samples counts, even if its gradient is 0: who has none is seen by the samples alone", moving),
    e("the paper's formula for shards of equal size, N/k: here they are unequal, weigh each by its samples",
      by(of_equal)),
    e("without bias, but the squares weigh alike, whatever their samples: of the estimates from these numbers it isn't "
      "the one that varies least. Weigh each by its samples", by(harmonic)),
    e("Σ |m_i|², where each weighs alike: a shard of n samples weighs n", by(
        lambda step: (step.sizes.sum() - step.N * square(step.whole)) / (step.k - 1))),
    e("Σ |m_i|² less k |m|²: a shard of n samples weighs n", by(
        lambda step: (step.sizes.sum() - step.k * square(step.whole)) / (step.k - 1))),
    e("weighed by samples squared: m_i is the mean's gradient, so n_i |m_i|²", by(
        lambda step: (step.n ** 2 @ step.sizes - step.N * square(step.whole)) / (step.k - 1))),
    e("divided by samples, where m_i is to be multiplied by them: n_i |m_i|²", by(
        lambda step: ((1 / step.n) @ step.sizes - step.N * square(step.whole)) / (step.k - 1))),
    e("|m_i| where |m_i|² is asked for", by(
        lambda step: (step.n @ np.sqrt(step.sizes) - step.N * square(step.whole)) / (step.k - 1))),
    e("|m| where |m|² is asked for", lambda step: None if step.k < 2 else (
        trace := (step.n @ step.sizes - step.N * math.sqrt(square(step.whole))) / (step.k - 1),
        math.sqrt(square(step.whole)) - trace / step.N)),
    e("the difference is the wrong way round: small batches' squares are the larger ones", by(
        lambda step: -variance(step))),
    e("|m|² is not |G|²: it is too large by tr(Σ)/N", lambda step: estimate(step, less=lambda step, trace: 0.0)),
    e("tr(Σ)/N comes off |m|²: N samples' mean has 1/N of the variance, not all of it", lambda step: estimate(
        step, less=lambda step, trace: trace)),
    e("tr(Σ)/k comes off |m|², where the variance of N samples' mean is tr(Σ)/N", lambda step: estimate(
        step, less=lambda step, trace: trace / step.k)),
    e("tr(Σ)/N is added to |m|²: noise makes it too large", lambda step: estimate(
        step, less=lambda step, trace: -trace / step.N)),
    e("|G|² isn't below 0, but its estimate may be: cut off at 0 its mean is too large", lambda step: (
        found := estimate(step)) and (found[0], max(found[1], 0.0))),
    e("the shards' distances from the mean of means: it is the mean by samples, `whole`", by(unweighted_mean)),
    e("a rank's shards are put together first: each shard is a measurement, and k is how many there are", merged),
    e("each rank has an estimate of its own: sum over all ranks first", alone),
    e("N is this rank's samples: `whole` is of all", local_samples),
    e("sums, not means over ranks: they are divided by {ranks}", averaged),
    e("|m|² is summed over the ranks: it is the same on all, and {ranks} times as large then", ranks_times),
    e("only rank 0 has the estimates: all ranks need them", at_rank_0),
    e("of one shard there is nothing to compare: None, and the averages stay, not zeros", zeros),
    when("update: of one shard there is nothing to compare: None, where k is below 2", of_one),
    when("the averages: each step's estimates are right, and what is made of them isn't: average = decay · average + "
         "(1 - decay) · estimate, from 0 on, for tr(Σ) and for |G|²; B_simple is the one over the other, with "
         "nothing added",
         lambda case, got: case[0]["what"] != "known" and near(case, got, 1e-9)),
    when("nearly right: are squares summed in float32, or is a small number added?", near),
]
