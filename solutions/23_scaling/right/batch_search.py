# 23.3: a search by thirds for the cheapest; the equation solved as it stands
import math
from typing import NamedTuple


class Job(NamedTuple):
    steps: float
    samples: float


def critical(job):
    return job.samples / job.steps


def steps(job, batch):
    return job.steps * (1 + 1 / (batch / critical(job)))


def samples(job, batch):
    return batch * steps(job, batch)


def of_two(first, second):
    (b1, s1), (b2, s2) = first, second
    least = (s1 - s2) / (1 / b1 - 1 / b2)
    job = Job(s1 - least / b1, least)
    return job if min(job) > 0 else None


def cheapest(job, per_step, per_sample, largest):
    def cost(b):
        return per_step * steps(job, b) + per_sample * samples(job, b)
    low, high = 1, largest
    while high - low > 2:
        third = (high - low) // 3
        a, b = low + third, high - third
        if cost(a) <= cost(b):
            high = b
        else:
            low = a
    return min(range(low, high + 1), key=cost)


def sgd_rate(lr, batch, new, noise):
    return lr * (1 + noise / batch) / (1 + noise / new)


def adam_settings(lr, betas, eps, batch, new):
    k = new / batch
    betas = tuple(1 - k * (1 - beta) for beta in betas)
    return (lr * math.sqrt(k), betas, eps / math.sqrt(k)) if min(betas) >= 0 else None
