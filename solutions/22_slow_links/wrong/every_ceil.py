# 22.4: is a float: H is an int
from typing import NamedTuple

import numpy as np


class Job(NamedTuple):
    numbers: int
    forward: float
    backward: float


class Link(NamedTuple):
    ranks: int
    latency: float
    bandwidth: float


def all_reduce(nbytes, link):
    return 2 * (link.ranks - 1) * (link.latency + nbytes / link.ranks / link.bandwidth)


def all_gather(nbytes, link):
    return (link.ranks - 1) * (link.latency + nbytes / link.bandwidth)


def data_parallel(job, link, buckets):
    free = 0.0
    for i in range(1, buckets + 1):
        free = max(free, job.forward + job.backward * i / buckets) + all_reduce(4 * job.numbers / buckets, link)
    return free


def one_bit(job, link, encode):
    return job.forward + job.backward + encode + all_gather(job.numbers / 8 + 8, link)


def power_sgd(job, link, p, q, encode):
    return job.forward + job.backward + encode + all_reduce(4 * p, link) + all_reduce(4 * q, link)


def diloco(job, link, every, overlap=0):
    compute = job.forward + job.backward
    return compute + max(0.0, all_reduce(4 * job.numbers, link) - overlap * compute) / every


def smallest_every(job, link, share):
    return max(1, np.ceil(all_reduce(4 * job.numbers, link) / (share * (job.forward + job.backward))))
