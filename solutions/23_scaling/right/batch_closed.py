# 23.3: the cheapest by comparing B (B + 1) with the best's square; two equations for two runs
import math
from typing import NamedTuple


class Job(NamedTuple):
    steps: float
    samples: float


def critical(job):
    return job.samples / job.steps


def steps(job, batch):
    return job.steps + job.samples / batch


def samples(job, batch):
    return job.samples + job.steps * batch


def of_two(first, second):
    (b1, s1), (b2, s2) = first, second
    least = (s1 - s2) * b1 * b2 / (b2 - b1)
    job = Job(s1 - least / b1, least)
    return job if min(job) > 0 else None


def cheapest(job, per_step, per_sample, largest):
    best = math.sqrt(per_step / per_sample * critical(job)) if per_sample else math.inf
    if best >= largest:
        return largest
    low = max(1, math.floor(best))
    return low if low * (low + 1) >= best ** 2 else low + 1


def sgd_rate(lr, batch, new, noise):
    return lr * new * (batch + noise) / (batch * (new + noise))


def adam_settings(lr, betas, eps, batch, new):
    k = new / batch
    betas = tuple(1 - k + k * beta for beta in betas)
    return (lr * math.sqrt(k), betas, eps / math.sqrt(k)) if min(betas) >= 0 else None
