# 22.4: the share is of the computing, not of the whole step
"""22.4 When is it worth it?

A step of training is computing and sending. How long each way takes can be known beforehand, from three numbers of the
job and three of the link: a message of b bytes takes latency + b / bandwidth seconds. All times are in seconds, all
sizes in bytes, a number has 4 of them, and nothing is rounded.
"""

import math
from typing import NamedTuple


class Job(NamedTuple):
    """numbers: of all gradients, or parameters; forward, backward: seconds of computing in a step."""

    numbers: int
    forward: float
    backward: float


class Link(NamedTuple):
    """ranks: N; latency: seconds per message; bandwidth: bytes per second that a rank can send."""

    ranks: int
    latency: float
    bandwidth: float


def all_reduce(nbytes, link):
    """Seconds for an all-reduce of an array of nbytes, by a ring: 2(N-1) messages one after the other, of 1/N each."""
    # begin with one message
    return 2 * (link.ranks - 1) * (link.latency + nbytes / link.ranks / link.bandwidth)


def all_gather(nbytes, link):
    """Seconds until every rank has everybody's nbytes, by a ring: N-1 messages one after the other, each of them whole.
    """
    # begin with one message
    return (link.ranks - 1) * (link.latency + nbytes / link.bandwidth)


def data_parallel(job, link, buckets):
    """Seconds per step, with the gradients in `buckets` all-reduces of equal size, overlapped with backward.

    Bucket i = 1, 2 … is complete when the i-th equal part of backward is done, in which nothing slows it down. It is
    sent then, or when the one before it has arrived. The step ends with the last one.
    """
    # begin with when the first bucket is complete, and when it has arrived. When can the second one be sent?
    free = 0.0
    for i in range(1, buckets + 1):
        free = max(free, job.forward + job.backward * i / buckets) + all_reduce(4 * job.numbers / buckets, link)
    return free


def one_bit(job, link, encode):
    """Seconds per step with 22.1 after backward: everybody's signs, eight in a byte, and 8 bytes of scale behind them.

    encode  seconds that a rank takes for packing and unpacking in a step
    """
    # begin with the bytes of what a rank hands to all_gather
    return job.forward + job.backward + encode + all_gather(job.numbers / 8 + 8, link)


def power_sgd(job, link, p, q, encode):
    """Seconds per step with 22.2 after backward: all matrices' P together, p numbers; then all their Q, q numbers.

    encode  seconds that a rank takes for its products and for making P orthonormal, in a step
    """
    # begin with why there are two messages: what must be known before Q?
    return job.forward + job.backward + encode + all_reduce(4 * p, link) + all_reduce(4 * q, link)


def diloco(job, link, every, overlap=0):
    """Seconds per step, on average, of workers that meet every H = `every` steps, by one all-reduce of all parameters.

    overlap  steps, fewer than H, that the workers go on to make while it is on its way. Who has done with them waits
    """
    # begin with one meeting: how long does anybody wait?
    compute = job.forward + job.backward
    return compute + max(0.0, all_reduce(4 * job.numbers, link) - overlap * compute) / every


def smallest_every(job, link, share):
    """The smallest H, an int, at least 1, with which waiting (without overlap) adds at most `share` of the computing:
    0.1 is 10 %."""
    every, compute = 1, job.forward + job.backward
    while (diloco(job, link, every) - compute) / diloco(job, link, every) > share:
        every += 1
    return every
