"""Numbers of 8 bits inside of a kernel, as optim/packed.py has them: the same bytes of the same values, and back.

unpack: a code's level is looked up, in a table of 1 KiB that stays in the first cache, and multiplied by its block's
scale.

pack: the array path looks the code up, too, by the upper 20 bits of a number's share of its block's scale: a table of
1 MiB, for which no first cache has room. But each power of 10 has evenly spaced levels, and codes go up with them. So a
share x between 0.1 and 1, where there are 2ⁿ levels, n = 6 or 7, has the code

    2ⁿ - 1 + round(2ⁿ · (x - 0.1) / 0.9)

and each factor 0.1 halves 2ⁿ. Where two powers of 10 meet, both give one code, so it doesn't matter which is taken. x
is the middle of all numbers with its upper 20 bits, as in the table, and a test goes through all 2²⁰ of them. Three lie
so little below a middle between two levels that rounding might lift them over it; so all are made smaller by ten
roundings. Then none is nearer to one than nine, which six operations don't make, whether a·b + c is one of them or two.
"""

import triton
import triton.language as tl

CODES = tl.constexpr(256)
SHARED = tl.constexpr(16)           # elements that have a scale together: optim.packed.BLOCK
MAGNITUDE = tl.constexpr(0x7FFFFFFF)    # the bits of a float32 but for its sign
INFINITY = tl.constexpr(0x7F800000)
NAN = tl.constexpr(0x7FC00000)
ONE = tl.constexpr(0x3F800000)
CELL = tl.constexpr(MAGNITUDE.value >> 12 << 12)        # the bits that are looked at: see optim.packed.CUT
MIDDLE = tl.constexpr(1 << 11)                          # of the others
DOWN = tl.constexpr(1 - 6e-7)       # ten roundings


@triton.jit
def unpack(codes, scales, levels):
    """Codes uint8 (n,), scales float32 (n / 16,), levels: where the level of code 0 is. Returns float32 (n,)."""
    blocks = tl.reshape(tl.load(levels + codes.to(tl.int32)), (scales.shape[0], SHARED))
    return tl.reshape(blocks * scales[:, None], codes.shape)


@triton.jit
def pack(values, SIGNED: tl.constexpr):
    """(codes uint8 (n,), scales float32 (n / 16,)) of values float32 (n,), n a power of 2 from 16 up."""
    blocks: tl.constexpr = values.shape[0] // SHARED
    values = tl.reshape(values, (blocks, SHARED))
    sizes = values.to(tl.int32, bitcast=True) & MAGNITUDE
    largest = tl.max(sizes, 1, keep_dims=True)      # whole numbers have the same order, with inf and NaN above all
    scales = tl.where(largest < INFINITY, largest, NAN).to(tl.float32, bitcast=True)
    shares = tl.div_rn(values, tl.where(largest == 0, 1.0, scales)).to(tl.int32, bitcast=True)
    x = tl.minimum((shares & CELL) | MIDDLE, ONE).to(tl.float32, bitcast=True)      # of NaN, too, the code of 1
    codes = _nearest(x, 64.0 if SIGNED else 128.0)
    if SIGNED:
        codes = tl.where(x > 0.5e-6, tl.maximum(codes, 1), codes) | ((shares >> 24) & 0x80)
    else:
        codes = tl.where(sizes != 0, tl.maximum(codes, 1), codes)
    return tl.reshape(codes.to(tl.uint8), (blocks * SHARED,)), tl.reshape(scales, (blocks,))


@triton.jit
def _nearest(x, count):
    """The code, int32, of x from 0 to 1, where count levels lie between 0.1 and 1; near the lowest of all it may be 0
    instead of 1."""
    low = x <= 1e-4
    x, count = tl.where(low, x * 1e4, x), tl.where(low, count * 0.0625, count)
    low = x <= 1e-2
    x, count = tl.where(low, x * 1e2, x), tl.where(low, count * 0.25, count)
    low = x <= 1e-1
    x, count = tl.where(low, x * 10, x), tl.where(low, count * 0.5, count)
    return (count * (x * (DOWN / 0.9) + DOWN * (1 - 0.1 / 0.9)) - 0.5).to(tl.int32)
