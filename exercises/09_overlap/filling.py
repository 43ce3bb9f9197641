"""09.1: the right buckets, and those that known mistakes fill."""

import numpy as np


def cut(nbytes, first, cap, order):
    """By cumulative sums: where has the bucket that begins at `at` reached its cap?"""
    sizes, buckets, at = [nbytes[i] for i in order], [], 0
    while at < len(order):
        held = np.cumsum(sizes[at:])
        full = held >= (cap if buckets else first)
        end = at + int(full.argmax()) + 1 if full.any() else len(order)
        buckets.append(list(order[at:end]))
        at = end
    return buckets


def forwards(case):
    return list(range(len(case["nbytes"])))


def backwards(case):
    return forwards(case)[::-1]


def cut_of(case, first=None, cap=None, order=None):
    return cut(case["nbytes"], first or case["first_bytes"], cap or case["cap_bytes"], order or backwards(case))


def never_over(case):
    """Buckets that are closed before they would grow beyond their caps."""
    buckets, held = [[]], 0
    for i in backwards(case):
        cap = case["first_bytes"] if len(buckets) == 1 else case["cap_bytes"]
        if buckets[-1] and held + case["nbytes"][i] > cap:
            buckets.append([])
            held = 0
        buckets[-1].append(i)
        held += case["nbytes"][i]
    return buckets


def only_above(case):
    """A bucket with exactly its cap takes one more."""
    return cut_of(case, case["first_bytes"] + 1, case["cap_bytes"] + 1)


def total_held(case):
    """The bytes held aren't counted from 0 in each bucket."""
    buckets, held = [[]], 0
    for i in backwards(case):
        if buckets[-1] and held >= (case["first_bytes"] if len(buckets) == 1 else case["cap_bytes"]):
            buckets.append([])
        buckets[-1].append(i)
        held += case["nbytes"][i]
    return buckets


def begun_at_0(case):
    """A bucket that holds 0 bytes isn't taken for one that has begun."""
    buckets, held = [], 0
    for i in backwards(case):
        cap = case["first_bytes"] if len(buckets) <= 1 else case["cap_bytes"]
        if held == 0 or held >= cap:
            buckets.append([])
            held = 0
        buckets[-1].append(i)
        held += case["nbytes"][i]
    return buckets


def over_counted(case):
    """What a bucket holds beyond its cap is counted in the next one as well."""
    buckets, held = [[]], 0
    for i in backwards(case):
        cap = case["first_bytes"] if len(buckets) == 1 else case["cap_bytes"]
        if buckets[-1] and held >= cap:
            buckets.append([])
            held -= cap
        buckets[-1].append(i)
        held += case["nbytes"][i]
    return buckets


def small_at_the_end(case):
    """The parameters 1, 2 … by cap_bytes; parameter 0 joins what is left, if that holds less than first_bytes."""
    order = backwards(case)
    buckets = cut(case["nbytes"], case["cap_bytes"], case["cap_bytes"], order[:-1])
    if buckets and sum(case["nbytes"][i] for i in buckets[-1]) < case["first_bytes"]:
        return [*buckets[:-1], buckets[-1] + order[-1:]]
    return [*buckets, order[-1:]]


def by_size(case):
    return cut_of(case, order=sorted(forwards(case), key=lambda i: -case["nbytes"][i]))


def full_to_the_end(case):
    buckets = cut_of(case)
    cap = case["first_bytes"] if len(buckets) == 1 else case["cap_bytes"]
    return sum(case["nbytes"][i] for i in buckets[-1]) >= cap
