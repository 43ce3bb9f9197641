"""23.3 Which batch, and at which rate?

To train to a goal takes some number of steps even with endless batches, S_min, and some number of samples even if they
come one by one, E_min. Between the two, with batches of B that are all used at their best rate, S steps and E = B · S
samples are needed, for which

    (S / S_min - 1) (E / E_min - 1) = 1

More batch is fewer steps, and more samples: less time, and more computing. Nothing is rounded but `cheapest`.
"""

import math
from typing import NamedTuple


class Job(NamedTuple):
    """What a goal takes at the least: S_min steps, E_min samples; both above 0."""

    steps: float
    samples: float


def critical(job):
    """B_crit, in samples: the batch that takes twice the fewest steps, and twice the fewest samples."""
    # begin with S = 2 S_min: how large is E then, by the equation? And what is B = E / S?
    return job.samples / job.steps


def steps(job, batch):
    """S, of batches of this size."""
    # begin with the equation, put E = batch · S into it, and solve for S
    return job.steps + job.samples / batch


def samples(job, batch):
    """E, of batches of this size."""
    # begin with what a batch has, and how many steps there are
    return job.samples + job.steps * batch


def of_two(first, second):
    """The Job of which two runs are known, each (batch, steps), of two batches. None where S_min or E_min wouldn't be
    above 0: then they were not of one goal, or not at their best rates."""
    # begin with S as a function of 1/B: what kind of curve is it? Two points are enough for it
    (b1, s1), (b2, s2) = first, second
    least = (s1 - s2) / (1 / b1 - 1 / b2)
    job = Job(s1 - least / b1, least)
    return job if min(job) > 0 else None


def cheapest(job, per_step, per_sample, largest):
    """The batch, an int from 1 to largest, that costs least: each step costs per_step, whatever the batch (time), and
    each sample per_sample (computing). One of the two may be 0. Of two that cost the same, either."""
    # begin with the cost as a function of B: of its two parts that depend on B, one falls and the other grows. largest
    # may be 10¹², so they can't all be tried
    best = math.sqrt(per_step / per_sample * critical(job)) if per_sample else math.inf
    low = int(max(1, min(best, largest)))
    return min((low, min(low + 1, largest)), key=lambda b: per_step * steps(job, b) + per_sample * samples(job, b))


def sgd_rate(lr, batch, new, noise):
    """SGD's best rate for batches of `new`, where lr is the best for those of `batch`, and the noise scale is `noise`.

    Along a gradient with noise the best rate is proportional to 1 / (1 + noise / batch): at first linear, later none.
    """
    # begin with the rate that endless batches would have
    return lr * (1 + noise / batch) / (1 + noise / new)


def adam_settings(lr, betas, eps, batch, new):
    """(lr, (β1, β2), eps) with which Adam does the same in batches of `new` as with those given in batches of `batch`.

    With κ times the batch the rate is √κ times as large and eps 1/√κ times; and as many samples are remembered as
    before, so 1 - β is κ times as large. None where a β would be below 0: so far the rule doesn't reach.
    """
    # begin with κ. The noise is most of what Adam divides by, and in κ times the batch it is 1/√κ times as large
    k = new / batch
    betas = tuple(1 - k * (1 - beta) for beta in betas)
    return (lr * math.sqrt(k), betas, eps / math.sqrt(k)) if min(betas) >= 0 else None
