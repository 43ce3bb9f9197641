"""Arrays, their devices, and the seeded random streams.

`xp` is NumPy. Its ufuncs and functions carry themselves to CuPy when an
argument is a CuPy array (NEP 13 and NEP 18), so an op is written once. Only a
function that makes an array out of nothing must ask `module_of(x)` where.

A device is named by a string: "cpu", "cuda:0", "cuda:1", …; "cuda" is the GPU
that is current (the first, unless `use` says otherwise). CuPy runs an op on the
current GPU, wherever its arrays are, so a process works on one GPU at a time:
`use("cuda:1")`, or `with on("cuda:1"):` for a while. CuPy is imported by the
first who names a GPU.
"""

import ctypes
import hashlib
import math
import operator
import sys
import threading
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

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


# ---------------------------------------------------------------- devices

DEVICE_ARRAYS = {}      # class of arrays on GPUs -> its module, as soon as CuPy is loaded; empty where there is none


def load_cupy():
    """The module cupy. RuntimeError, with what is missing, where it can't run."""
    if DEVICE_ARRAYS:
        return sys.modules["cupy"]
    try:
        import cupy
    except ImportError as error:
        raise RuntimeError(f"a GPU needs CuPy, which can't be imported ({error}): pip install "
                           "minitorch_dist[gpu-cuda13] or [gpu-cuda12], whichever the driver supports") from error
    if not cupy.cuda.is_available():
        raise RuntimeError("CuPy is installed, but finds no GPU: there is none, or no driver, or CUDA_VISIBLE_DEVICES "
                           "hides it; `nvidia-smi` and `python -m minitorch_dist doctor` show more")
    # Where GPUs can read each other's memory CuPy warns and goes on, with a result on the current one: an op on a
    # tensor of cuda:1 would come out on cuda:0.
    warnings.filterwarnings("error", message="The device where the array resides")
    DEVICE_ARRAYS[cupy.ndarray] = cupy
    return cupy


class Placeholder:
    """Base of what stands for an array, on the device `place`, that isn't computed yet (compiler/capture.py)."""

    __slots__ = ("place",)


def is_array(value):
    """True for arrays of any device; False for NumPy scalars, traced values and everything else."""
    return isinstance(value, (xp.ndarray, Placeholder)) or value.__class__ in DEVICE_ARRAYS \
        or hasattr(type(value), "__cuda_array_interface__")


def on_host(value):
    """Whether a raw value is NumPy's or Python's: asking for its elements needs no waiting for a GPU."""
    return isinstance(value, ARRAY_TYPES) or not is_array(value)


def module_of(array):
    """The module, numpy or cupy, that the array comes from."""
    if isinstance(array, Placeholder) and array.place != "cpu":
        return array.module
    return DEVICE_ARRAYS.get(array.__class__) or (xp if device_of(array) == "cpu" else load_cupy())


def module_on(device):
    """The module, numpy or cupy, that makes arrays on a device: inside of `with on(device):`."""
    return xp if device == "cpu" else load_cupy()


def device_of(array):
    """The name of the device that a raw array lives on; numbers live on the "cpu"."""
    if isinstance(array, Placeholder):
        return array.place
    return "cpu" if on_host(array) else f"cuda:{array.device.id}"


def names_device(target):
    """Whether what .to() was given names a device; otherwise it is a dtype."""
    return isinstance(target, str) and target not in xp.sctypeDict


def device_name(device):
    """A device as device_of writes it: "cuda" becomes the current one. ValueError for a name that is none, RuntimeError
    for a GPU that isn't there."""
    if device == "cpu":
        return device
    kind, _, number = str(device).partition(":")
    if kind != "cuda" or not (number.isdecimal() or str(device) == "cuda"):
        raise ValueError(f"device {device!r} is unknown: there are 'cpu', 'cuda' (the current GPU) and 'cuda:0', "
                         "'cuda:1', …")
    runtime = load_cupy().cuda.runtime
    if not number:
        return f"cuda:{runtime.getDevice()}"
    if int(number) >= (count := runtime.getDeviceCount()):
        raise RuntimeError(f"device {device!r}: this process sees {count} GPU{'s' * (count > 1)}, cuda:0"
                           + (f" to cuda:{count - 1}" if count > 1 else ""))
    return f"cuda:{int(number)}"


def on(device):
    """A context manager: inside of it, ops run on this GPU ("cpu": no change)."""
    name = device_name(device)
    return nullcontext() if name == "cpu" else load_cupy().cuda.Device(int(name[5:]))


def use(device):
    """Make this the GPU on which this thread's ops run from now on ("cpu": no change). Returns the device's name."""
    name = device_name(device)
    if name != "cpu":
        load_cupy().cuda.Device(int(name[5:])).use()
    return name


def to(array, device):
    """A raw array on a device; itself, where it is there already.

    On its way up it goes through CuPy's pool of pinned memory, so that the program doesn't wait; on its way down the
    program waits for the array, and the checks that were put off (see refuse) speak.
    """
    name, here = device_name(device), device_of(array)
    if name == here:
        return array
    refuse_in_graph(f"a copy from {here} to {name}")
    if name == "cpu":
        with on(here):
            settle()
            return array.get()
    if here == "cpu":
        with on(name):
            return load_cupy().asarray(array)
    # CuPy orders the copy among the work of its own GPU alone: the array must be there before, and may go after.
    with on(here):
        array = load_cupy().ascontiguousarray(array)
        finish()
    with on(name):
        moved = array.copy()
        finish()
    return moved


def finish():
    """Wait until the current GPU has done what its current stream holds."""
    load_cupy().cuda.get_current_stream().synchronize()


def to_device_of(array, like):
    """A raw array on the device of another."""
    return array if on_host(array) and on_host(like) else to(array, device_of(like))


def check_devices(name, values, error=None):
    """Raise RuntimeError if an op's raw values live on several devices, or on a GPU that isn't the current one."""
    arrays = [v for v in values if is_array(v)]
    devices = {device_of(a) for a in arrays}
    if devices <= {"cpu"} or devices == {current := device_name("cuda")}:
        return
    described = " and ".join(f"{list(a.shape)} on {device_of(a)}" for a in arrays)
    if len(devices) > 1:
        raise RuntimeError(f"{name}: arrays of different devices, {described}: move them to one with "
                           f".to({max(devices)!r})") from error
    where, = devices
    raise RuntimeError(f"{name}: {described}, but the current GPU is {current}: call backend.use({where!r}), or "
                       f"work inside `with backend.on({where!r}):`") from error


def matmul(x, y, out=None):
    """x @ y of raw arrays of two axes or more."""
    if x.__class__ is not xp.ndarray:
        if recording.graph is not None:
            return recording.graph.matmul(x, y, out)
    elif x.itemsize == 2 and is_half(x):
        product = in_float32(xp.matmul, x, y)
        if out is None:
            return product
        out[...] = product
        return out
    return xp.matmul(x, y, out=out)


# ---------------------------------------------------------------- floats of 16 bits on the host

def is_half(array):
    """Whether an array of the host (or a number of NumPy's) has floats of 16 bits."""
    return array.dtype == xp.float16 and isinstance(array, ARRAY_TYPES)


def in_float32(function, *args):
    """function(*args), computed in float32 and rounded once: floats of 16 bits among the arguments are widened, and if
    there are no others, float32 results are rounded to theirs. Arguments and results may be tuples.

    Processors add up products of 16 bits in 32, and so do GPUs. NumPy rounds after each addition, and takes 90 times
    as long for a product of matrices as BLAS does in float32.
    """
    floats = {a.dtype for a in _leaves(args) if getattr(a, "dtype", None) is not None and a.dtype.kind == "f"}
    out = function(*_each(args, xp.float16, lambda x: x.astype(xp.float32)))
    return _each(out, xp.float32, to_half) if floats == {xp.dtype(xp.float16)} else out


def to_half(x):
    """x.astype(float16); what is too large becomes inf without a warning, for optim.GradScaler to see."""
    if isinstance(x, xp.ndarray) and x.ndim and x.dtype == xp.float32:
        # For each number below 2⁻¹⁴ that NumPy rounds it raises the processor's flag for that, in half a microsecond.
        # So they are rounded to multiples of 2⁻²⁴ before, which is the distance of float32's numbers around 0.75.
        small = x + xp.float32(0.75)
        small -= xp.float32(0.75)
        xp.copysign(small, x, out=small)
        xp.copyto(small, x, where=xp.absolute(x) >= 2.0 ** -14)
        x = small
    with xp.errstate(over="ignore"):
        return x.astype(xp.float16)


def _leaves(tree):
    for part in tree:
        if part.__class__ is tuple:
            yield from _leaves(part)
        else:
            yield part


def _each(tree, dtype, function):
    """The tree with function(x) in the place of each host array x of a dtype."""
    if tree.__class__ is tuple:
        return tuple(_each(part, dtype, function) for part in tree)
    return function(tree) if isinstance(tree, ARRAY_TYPES) and tree.dtype == dtype else tree


def zeros(shape, dtype, device="cpu"):
    """A raw array of zeros on a device."""
    with on(device):
        return module_on(device).zeros(shape, dtype)


def zeros_like(array, shape=None, dtype=None):
    """Zeros of the given shape and dtype (default: the array's own) on the array's device."""
    return module_of(array).zeros(array.shape if shape is None else shape, dtype or array.dtype)


def byte_range(array):
    """(first, last+1) address that the array's elements touch; None for scalars and empty arrays. Each GPU's addresses
    are shifted out of the others' way."""
    if not hasattr(array, "strides") or isinstance(array, xp.generic) or array.size == 0:
        return None
    if isinstance(array, xp.ndarray):
        if array.flags.c_contiguous:        # three times faster than asking NumPy, and nearly always so
            first = array.__array_interface__["data"][0]
            return first, first + array.nbytes
        return xp.lib.array_utils.byte_bounds(array)
    first = last = array.data.ptr + (array.data.device_id + 1 << 64)
    if array.flags.c_contiguous:
        return first, first + array.nbytes
    for extent, stride in zip(array.shape, array.strides, strict=True):
        if stride < 0:
            first += (extent - 1) * stride
        else:
            last += (extent - 1) * stride
    return first, last + array.itemsize


def memory_info():
    """{device: {"used", "held", "free", "total"}} in bytes, of every GPU that this process sees: in arrays, in CuPy's
    pool (arrays and what it keeps for new ones), and the device's own. Empty where no GPU is in use."""
    if not DEVICE_ARRAYS:
        return {}
    cupy, info = load_cupy(), {}
    for i in range(cupy.cuda.runtime.getDeviceCount()):
        with cupy.cuda.Device(i) as device:
            pool, (free, total) = cupy.get_default_memory_pool(), device.mem_info
            info[f"cuda:{i}"] = {"used": pool.used_bytes(), "held": pool.total_bytes(), "free": free, "total": total}
    return info


# ---------------------------------------------------------------- what graphs are made of

class Recording(threading.local):
    """What this thread's operations become a part of."""

    graph = None    # or a Recorder (cuda_graphs.py), or a Capture (compiler/capture.py)


recording = Recording()


def refuse_in_graph(what):
    """Raise in a function that a graph repeats: `what` would be done once only."""
    if recording.graph is not None:
        raise recording.graph.refusal(what)


def assign(array, values):
    """array[...] = values, of what a function keeps (running statistics); in a compiled one at the end of each call."""
    if recording.graph is not None:
        recording.graph.assign(array, values)
    else:
        array[...] = values


# ---------------------------------------------------------------- checks of values on a GPU

put_off = []    # [(0-d bool array, error)]: checks whose answers nobody has waited for yet
MOST = 256      # more are not kept


def refuse(bad, error):
    """Raise `error` if `bad`, a 0-d bool, is true: at once on the host. The answer of a GPU would have to be waited
    for, so there the error comes as soon as any value is brought to the host (item(), cpu(), …)."""
    if not on_host(bad):
        if recording.graph is not None:
            recording.graph.check(bad, error)
            return
        put_off.append((bad, error))
        if len(put_off) > MOST:
            settle()
    elif bad:
        raise error


def settle():
    """Wait for the checks that were put off, and raise the first error."""
    while put_off:
        here = device_of(put_off[0][0])
        checks = [check for check in put_off if device_of(check[0]) == here]
        put_off[:] = [check for check in put_off if device_of(check[0]) != here]
        with on(here):
            answers = load_cupy().stack([bad for bad, _ in checks]).get()
        for bad, (_, error) in zip(answers, checks, strict=True):
            if bad:
                raise error


# ---------------------------------------------------------------- random streams

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
    random_state.draws += 1
    return stream_key("default", random_state.seed, random_state.draws)


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
    draws = random_draws(shape)
    if len(draws) == 1 and not draws[0].first:
        out = generator(draws[0].key).random(shape, xp.float32)
    else:
        out = xp.empty(math.prod(shape), xp.float32)
        for draw in draws:      # drawn from the start, then cut: the same numbers, whoever holds a part of the shard
            drawn = generator(draw.key).random(draw.first + draw.count, xp.float32)
            out[draw.at:draw.at + draw.count] = drawn[draw.first:]
    return to_device_of(out.reshape(shape), like)


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
