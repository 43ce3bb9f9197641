"""Random streams, keyed by what their numbers are for."""

import hashlib
import math
import operator
import threading
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as xp

from .devices import Placeholder, to_device_of
from .graphs import recording, refuse_in_graph


def stream(*key):
    """A np.random.Generator that depends on the key alone: stream("shuffle", seed, epoch).

    The key (strings and integers) is hashed into the 128-bit key of a Philox
    counter generator, so that equal keys give equal numbers in any process, in
    any order, and different keys give independent streams. Making one costs
    about 30 µs. Source: Salmon et al. 2011, "Parallel random numbers: as easy
    as 1, 2, 3".
    """
    return generator(stream_key(*key))


def stream_key(*key):
    """The 128-bit key that stream(*key) gives its generator."""
    # np.int64(3) reads otherwise than 3, and a float has no one way to be written: hence index(), which raises.
    key = tuple(part if isinstance(part, str) else int(operator.index(part)) for part in key)
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=16).digest(), "little")


def generator(key):
    """The np.random.Generator of a 128-bit key."""
    return xp.random.Generator(xp.random.Philox(key=key))


class RandomState(threading.local):
    """What the library's own draws are keyed by, besides the call: set by `manual_seed` and `random_scope`."""

    seed = 0
    draws = 0           # how many draws were made outside of any scope
    scope = None        # the step now running
    path = ()           # the module now running, kept by nn.Module
    by_sample = None    # what becomes of draws outside of any scope: None, they are made; "warn" and "refuse"


random_state = RandomState()


@dataclass
class Scope:
    """One step's random numbers: which rows of the global batch this process works on."""

    seed: int
    step: int
    count: int          # samples in the global batch
    rows: tuple         # (first, last+1) of them here
    micro_shards: int
    calls: dict         # module path -> draws so far


def manual_seed(seed):
    """Start the library's default stream of random numbers (initial values, dropout outside of a scope) anew."""
    random_state.seed, random_state.draws = seed, 0


def next_stream():
    """The default stream's next generator. Same seed, same order of calls: same numbers."""
    return generator(_next_key())


def _next_key():
    refuse_in_graph("drawing random numbers")
    if random_state.by_sample == "warn":
        warnings.warn("random numbers of this forward are the same on all ranks, which have other samples: run it "
                      "inside `with mt.backend.random_scope(seed, step, batch.count, shard.rows):`, where they belong "
                      "to the samples, whatever the number of ranks", stacklevel=2)
    elif random_state.by_sample:
        raise RuntimeError("exact mode: these random numbers would depend on the number of ranks. Run forward inside "
                           "`with mt.backend.random_scope(seed, step, batch.count, shard.rows):`, and draw by dropout, "
                           "mt.rand or mt.randn, whose numbers there belong to the sample")
    random_state.draws += 1
    return stream_key("default", random_state.seed, random_state.draws)


@contextmanager
def random_scope(seed, step, count, rows, micro_shards=8):
    """Key the random numbers of a training step by (seed, step, micro-shard, module path, call), never by rank.

    The global batch of `count` samples is cut into `micro_shards` parts, each
    with a stream of its own; this process works on `rows` = (first, last+1).
    However many ranks share the batch, each sample meets the same numbers.
    """
    if not (isinstance(rows, (tuple, list)) and len(rows) == 2):
        raise ValueError(f"random_scope: rows {rows!r} must be the pair (first, last + 1) of those here, as shard.rows")
    first, last = rows
    if not 0 <= first <= last <= count:
        raise ValueError(f"random_scope: rows {first} to {last} are no part of a global batch of {count}")
    if micro_shards < 1:
        raise ValueError(f"random_scope: micro_shards is {micro_shards}; it must be at least 1")
    outer = random_state.scope
    random_state.scope = Scope(seed, step, count, rows, micro_shards, {})
    try:
        yield
    finally:
        random_state.scope = outer


@contextmanager
def random_by_sample(how="refuse"):
    """Refuse, by RuntimeError, draws that no random_scope keys, or "warn" of them: they are the same on all ranks, and
    others than those of one process."""
    outer, random_state.by_sample = random_state.by_sample, how
    try:
        yield
    finally:
        random_state.by_sample = outer


def random_snapshot():
    """Where the random streams stand, for random_restore: checkpointing draws the same numbers twice."""
    scope = random_state.scope
    return (random_state.seed, random_state.draws, random_state.path, scope, dict(scope.calls) if scope else None,
            recording.graph and recording.graph.drawn)


def random_restore(snapshot):
    """Go back to where the streams stood."""
    random_state.seed, random_state.draws, random_state.path, random_state.scope, calls, drawn = snapshot
    if recording.graph is not None:
        recording.graph.drawn = drawn
    if random_state.scope:
        random_state.scope.calls = dict(calls)


def random_rows(shape, like=None):
    """Uniform float32 in [0, 1) of the given shape, whose first axis runs over the samples here (or a multiple of
    them: samples × positions), on the device of `like`. Inside a random_scope the numbers depend on the sample's place
    in the global batch. They are drawn on the host and moved, so that they are the same on every device."""
    if isinstance(like, Placeholder):
        return recording.graph.random_rows(shape)
    return to_device_of(uniform_of_draws(random_draws(shape), shape), like)


def normal_rows(shape):
    """As random_rows, of the standard normal distribution; on the host."""
    return _of_draws(random_draws(shape), shape, xp.random.Generator.standard_normal)


def uniform_of_draws(draws, shape):
    """The numbers that random_draws(shape) has found keys for, uniform float32 in [0, 1), on the host."""
    return _of_draws(draws, shape, xp.random.Generator.random)


def _of_draws(draws, shape, numbers):
    if len(draws) == 1 and not draws[0].first:
        return numbers(generator(draws[0].key), shape, xp.float32)
    out = xp.empty(math.prod(shape), xp.float32)
    for draw in draws:      # drawn from the start, then cut: the same numbers, whoever holds a part of the shard
        drawn = numbers(generator(draw.key), draw.first + draw.count, xp.float32)
        out[draw.at:draw.at + draw.count] = drawn[draw.first:]
    return out.reshape(shape)


class Draw(NamedTuple):
    """Elements at … at + count - 1 of an array, counted through it, are numbers first … of a key's stream."""

    key: int
    first: int
    count: int
    at: int


def random_draws(shape):
    """What random_rows(shape) draws next, as data: a list of Draws. A GPU makes the numbers itself, from the keys."""
    scope, size = random_state.scope, math.prod(shape)
    refuse_in_graph("drawing random numbers")
    if scope is None:
        return [Draw(_next_key(), 0, size, 0)]
    call = scope.calls[random_state.path] = scope.calls.get(random_state.path, 0) + 1
    first, last = scope.rows
    key = (scope.seed, scope.step, *random_state.path, call)
    if not shape or shape[0] % max(1, last - first) or last == first:
        return [Draw(stream_key("draw", "whole", *key), 0, size, 0)]
    per_sample, draws = size // (last - first), []
    for shard in range(scope.micro_shards):
        begin, end = (scope.count * s // scope.micro_shards for s in (shard, shard + 1))
        low, high = max(begin, first), min(end, last)
        if low < high:
            draws.append(Draw(stream_key("draw", shard, *key), (low - begin) * per_sample, (high - low) * per_sample,
                              (low - first) * per_sample))
    return draws
