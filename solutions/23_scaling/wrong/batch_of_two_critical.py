# 23.3: of_two: a Job's second number is E_min
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
    least = (s1 - s2) / (1 / b1 - 1 / b2)
    job = Job(s1 - least / b1, least)
    return Job(job.steps, job.samples / job.steps) if min(job) > 0 else None


def cheapest(job, per_step, per_sample, largest):
    best = math.sqrt(per_step / per_sample * critical(job)) if per_sample else math.inf
    low = int(max(1, min(best, largest)))
    return min((low, min(low + 1, largest)), key=lambda b: per_step * steps(job, b) + per_sample * samples(job, b))


def sgd_rate(lr, batch, new, noise):
    return lr * (1 + noise / batch) / (1 + noise / new)


def adam_settings(lr, betas, eps, batch, new):
    k = new / batch
    betas = tuple(1 - k * (1 - beta) for beta in betas)
    return (lr * math.sqrt(k), betas, eps / math.sqrt(k)) if min(betas) >= 0 else None
