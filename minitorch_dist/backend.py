"""Arrays, their devices, and the seeded random streams.

`xp` is NumPy. Its ufuncs and functions carry themselves to CuPy when an
argument is a CuPy array (NEP 13 and NEP 18), so an op is written once. Only a
function that makes an array out of nothing must ask `module_of(x)` where.
"""

import ctypes
import hashlib
import operator
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as xp

ARRAY_TYPES = (xp.ndarray, xp.generic)   # a NumPy reduction over all axes gives a scalar (np.generic), not an array


def keep_freed_memory():
    """Let this process keep the memory of freed arrays of up to 32 MiB for the next ones (Linux with glibc; elsewhere
    nothing). By default glibc hands large blocks back to the kernel, and every step of training faults its temporaries
    in again, page by page: LeNet's step takes twice as long on a virtual machine. Called on import."""
    trim_threshold, mmap_threshold = -1, -3     # names of malloc.h: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
    if sys.platform == "linux":
        try:
            mallopt = ctypes.CDLL(None).mallopt
        except (OSError, AttributeError):       # another C library
            return
        mallopt(mmap_threshold, 32 << 20)
        mallopt(trim_threshold, 1 << 30)


keep_freed_memory()


def module_of(array):
    """The module, numpy or cupy, that the array comes from."""
    if isinstance(array, ARRAY_TYPES):
        return xp
    import cupy
    return cupy.get_array_module(array)


def zeros_like(array, shape=None, dtype=None):
    """Zeros of the given shape and dtype (default: the array's own) on the array's device."""
    return module_of(array).zeros(array.shape if shape is None else shape, dtype or array.dtype)


def byte_range(array):
    """(first, last+1) address that the array's elements touch; None for scalars and empty arrays."""
    if not hasattr(array, "strides") or isinstance(array, xp.generic) or array.size == 0:
        return None
    if isinstance(array, xp.ndarray):
        if array.flags.c_contiguous:        # three times faster than asking NumPy, and nearly always so
            first = array.__array_interface__["data"][0]
            return first, first + array.nbytes
        return xp.lib.array_utils.byte_bounds(array)
    first = last = array.data.ptr
    for extent, stride in zip(array.shape, array.strides, strict=True):
        if stride < 0:
            first += (extent - 1) * stride
        else:
            last += (extent - 1) * stride
    return first, last + array.itemsize


# ---------------------------------------------------------------- random streams

def stream(*key):
    """A np.random.Generator that depends on the key alone: stream("shuffle", seed, epoch).

    The key (strings and integers) is hashed into the 128-bit key of a Philox
    counter generator, so that equal keys give equal numbers in any process, in
    any order, and different keys give independent streams. Making one costs
    about 30 µs. Source: Salmon et al. 2011, "Parallel random numbers: as easy
    as 1, 2, 3".
    """
    # np.int64(3) reads otherwise than 3, and a float has no one way to be written: hence index(), which raises.
    key = tuple(part if isinstance(part, str) else int(operator.index(part)) for part in key)
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    return xp.random.Generator(xp.random.Philox(key=int.from_bytes(digest, "little")))


class RandomState(threading.local):
    """What the library's own draws are keyed by, besides the call: set by `manual_seed` and `random_scope`."""

    seed = 0
    draws = 0           # how many draws were made outside of any scope
    scope = None        # the step now running
    path = ()           # the module now running, kept by nn.Module


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
    random_state.draws += 1
    return stream("default", random_state.seed, random_state.draws)


@contextmanager
def random_scope(seed, step, count, rows, micro_shards=8):
    """Key the random numbers of a training step by (seed, step, micro-shard, module path, call), never by rank.

    The global batch of `count` samples is cut into `micro_shards` parts, each
    with a stream of its own; this process works on `rows` = (first, last+1).
    However many ranks share the batch, each sample meets the same numbers.
    """
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


def random_snapshot():
    """Where the random streams stand, for random_restore: checkpointing draws the same numbers twice."""
    scope = random_state.scope
    return random_state.seed, random_state.draws, random_state.path, scope, dict(scope.calls) if scope else None


def random_restore(snapshot):
    """Go back to where the streams stood."""
    random_state.seed, random_state.draws, random_state.path, random_state.scope, calls = snapshot
    if random_state.scope:
        random_state.scope.calls = dict(calls)


def random_rows(shape):
    """Uniform float32 in [0, 1) of the given shape, whose first axis runs over the samples here (or a multiple of
    them: samples × positions). Inside a random_scope the numbers depend on the sample's place in the global batch."""
    scope = random_state.scope
    if scope is None:
        return next_stream().random(shape, xp.float32)
    call = scope.calls[random_state.path] = scope.calls.get(random_state.path, 0) + 1
    first, last = scope.rows
    key = (scope.seed, scope.step, *random_state.path, call)
    if not shape or shape[0] % max(1, last - first) or last == first:
        return stream("draw", "whole", *key).random(shape, xp.float32)
    per_sample = shape[0] // (last - first)
    out = xp.empty(shape, xp.float32)
    for shard in range(scope.micro_shards):
        begin, end = (scope.count * s // scope.micro_shards for s in (shard, shard + 1))
        low, high = max(begin, first), min(end, last)
        if low < high:      # drawn whole, then cut: the same numbers, whoever holds a part of the shard
            drawn = stream("draw", shard, *key).random(((end - begin) * per_sample, *shape[1:]), xp.float32)
            out[(low - first) * per_sample:(high - first) * per_sample] = \
                drawn[(low - begin) * per_sample:(high - begin) * per_sample]
    return out
