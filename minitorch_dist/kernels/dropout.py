"""Dropout without a mask in memory: the random numbers are made where they are used, the same as NumPy's.

    out = x · (u ≥ p) / (1 - p),    u uniform in [0, 1)

u is a number of the stream backend.stream(…) draws from: NumPy's generator Philox 4x64-10 for a 128-bit key. Philox is
a counter generator, which turns (key, counter) into four 64-bit words by ten rounds of multiplication, whatever came
before. So a program can begin anywhere in the stream, and backward makes the same mask again from the key alone. Bit
for bit as NumPy does it: block b of the stream has the counter b + 1; each of its words gives two float32 numbers, the
low half's first, a half h being (h >> 8) · 2⁻²⁴.

    stream    | block 0: counter 1                | block 1: counter 2                | …
    words     | word 0 | word 1 | word 2 | word 3 | word 0 | …
    numbers   | 0    1 | 2    3 | 4    5 | 6    7 | 8    9 | …

It moves 8 bytes per float32 element (read x, write out), in forward and in backward. With numbers drawn on the host
there are 4 bytes over the bus, a comparison and a product, some 30 bytes per element, and a mask kept for backward.

Sources: Srivastava et al. 2014, "Dropout"; Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Philox).
"""

import numpy as np
import triton
import triton.language as tl

from ..backend import module_of
from . import launch
from .kernel import Kernel

PER_BLOCK = 8       # float32 numbers of one counter
MULTIPLIER0, MULTIPLIER1 = tl.constexpr(0xD2E7470EE14C6C93), tl.constexpr(0xCA5A826395121157)
WEYL0, WEYL1 = tl.constexpr(0x9E3779B97F4A7C15), tl.constexpr(0xBB67AE8584CAA73B)


@triton.jit
def _philox(counter, key0, key1):
    """The four words of counters (uint64; the other three words of a counter are 0)."""
    x0 = counter
    x1 = tl.zeros_like(x0)
    x2 = tl.zeros_like(x0)
    x3 = tl.zeros_like(x0)
    multiplier0 = tl.full(x0.shape, MULTIPLIER0, tl.uint64)
    multiplier1 = tl.full(x0.shape, MULTIPLIER1, tl.uint64)
    key0 = tl.zeros_like(x0) + key0
    key1 = tl.zeros_like(x0) + key1
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(multiplier0, x0), multiplier0 * x0
        high1, low1 = tl.umulhi(multiplier1, x2), multiplier1 * x2
        x0, x1, x2, x3 = high1 ^ x1 ^ key0, low1, high0 ^ x3 ^ key1, low0
        key0 += tl.full(x0.shape, WEYL0, tl.uint64)
        key1 += tl.full(x0.shape, WEYL1, tl.uint64)
    return x0, x1, x2, x3


@triton.jit
def _low(word):
    return ((word & 0xFFFFFFFF) >> 8).to(tl.int32).to(tl.float32) * (1.0 / 16777216)


@triton.jit
def _high(word):
    return (word >> 40).to(tl.int32).to(tl.float32) * (1.0 / 16777216)


@triton.jit
def _uniform(first, key0, key1, BLOCK: tl.constexpr):
    """The BLOCK numbers of a stream from its block `first` on, in order."""
    counter = (first + 1 + tl.arange(0, BLOCK // 8)).to(tl.uint64)
    x0, x1, x2, x3 = _philox(counter, key0.to(tl.int64).to(tl.uint64), key1.to(tl.int64).to(tl.uint64))
    even = tl.interleave(tl.interleave(_low(x0), _low(x2)), tl.interleave(_low(x1), _low(x3)))
    odd = tl.interleave(tl.interleave(_high(x0), _high(x2)), tl.interleave(_high(x1), _high(x3)))
    return tl.interleave(even, odd)


@triton.jit
def _philox_uniform(out, n, first, shift, key0, key1, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    places = program * BLOCK + tl.arange(0, BLOCK) - shift
    numbers = _uniform(first + program * (BLOCK // 8), key0, key1, BLOCK)
    tl.store(out + places, numbers, mask=(places >= 0) & (places < n))


@triton.jit
def _dropout(x, out, n, first, shift, key0, key1, p, factor, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    places = program * BLOCK + tl.arange(0, BLOCK) - shift
    inside = (places >= 0) & (places < n)
    kept = _uniform(first + program * (BLOCK // 8), key0, key1, BLOCK) >= p
    v = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + places, (v * tl.where(kept, factor, 0.0)).to(out.dtype.element_ty), mask=inside)


def uniform_definition(key, offset, n):
    """Numbers offset … offset + n - 1 of the stream with this key, in NumPy."""
    return np.random.Generator(np.random.Philox(key=key)).random(offset + n, np.float32)[offset:]


def definition(x, p, key, offset=0):
    """Dropout in NumPy; its own gradient, for it is linear in x."""
    return x * (uniform_definition(key, offset, x.size).reshape(x.shape) >= p) / (1 - p)


_NUMBERS = {"n": "i64", "first": "i64", "shift": "i32", "key0": "i64", "key1": "i64"}
PHILOX_UNIFORM = Kernel("philox_uniform", _philox_uniform, {"out": "*fp32", **_NUMBERS}, {"BLOCK": 1024},
                        divisible=("n", "shift"), examples=({},))
DROPOUT = Kernel(
    "dropout", _dropout, {"x": "*", "out": "*", **_NUMBERS, "p": "fp32", "factor": "fp32"}, {"BLOCK": 1024},
    divisible=("n", "shift"), examples=({"*": "fp32"}, {"*": "bf16"}, {"*": "fp16"}),
    configs=tuple({"BLOCK": block, "num_warps": warps} for block in (512, 1024, 2048, 4096) for warps in (4, 8)))
KERNELS = (PHILOX_UNIFORM, DROPOUT)


def _place(key, offset, n, block):
    """(the grid, the arguments that say where in which stream): a program starts at a block of the stream, so the first
    element is `shift` numbers behind where the first program starts."""
    if not 0 <= key < 1 << 128 or offset < 0:
        raise ValueError(f"dropout: key {key:#x} and offset {offset}; a key has 128 bits, an offset is not negative")
    first, shift = divmod(offset, PER_BLOCK)
    halves = (int(np.uint64(half).astype(np.int64)) for half in (key & (1 << 64) - 1, key >> 64))
    return (launch.cdiv(shift + n, block) if n else 0,), (n, first, shift, *halves)


def philox_uniform(key, offset, n, like):
    """float32 (n,) on `like`'s device: the numbers offset … offset + n - 1 that Generator(Philox(key=key)).random draws
    in float32."""
    out = launch.empty((n,), np.float32, like)
    grid, place = _place(key, offset, n, PHILOX_UNIFORM.constexprs["BLOCK"])
    PHILOX_UNIFORM(grid, out, *place)
    return out


def uniform_of_draws(shape, draws, like):
    """float32 of a shape on `like`'s device: the numbers that backend.random_rows draws; `draws` is
    backend.random_draws(shape)."""
    parts = [philox_uniform(key, first, count, like) for key, first, count, _ in draws]
    whole = parts[0] if len(parts) == 1 else module_of(like).concatenate(parts)
    return whole.reshape(shape)


def dropout(x, p, key, offset=0, out=None):
    """x with each element zeroed with probability p < 1 and the others divided by 1 - p; C-contiguous, into `out` or a
    new array. Element i, counted through x, is kept where number offset + i of the key's stream is ≥ p."""
    out = launch.empty(x.shape, x.dtype, x) if out is None else out
    factor = float(x.dtype.type(1) / x.dtype.type(1 - p))       # rounded as on the host: the results have the same bits
    grid, place = _place(key, offset, x.size, DROPOUT.constexprs["BLOCK"])
    DROPOUT(grid, x, out, *place, p, factor)
    return out


def dropout_of_draws(x, p, draws):
    """x with the elements dropped that backend.random_rows would drop: `draws` is backend.random_draws(x.shape)."""
    x = launch.contiguous(x)
    out = launch.empty(x.shape, x.dtype, x)
    flat, flat_out = x.reshape(-1), out.reshape(-1)
    for key, first, count, at in draws:
        dropout(flat[at:at + count], p, key, first, flat_out[at:at + count])
    return out
