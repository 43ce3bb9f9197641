"""Optimizer state of 8 bits: Adam's two moments in 2.5 bytes per parameter instead of 8.

    values   16 numbers  →  16 codes of 8 bits, and the largest |value|, their scale, in the values' dtype
                            10 bits each, where float32 has 32

A code stands for a level, times its block's scale. Most of a moment's numbers are far below their block's largest: so
each power of 10 has levels of its own, evenly spaced ("dynamic tree quantisation"). A code is read from its bits:

    0 0 1 1 1 0 0 1
    │ │ │ └───────┴ a fraction f = 25 of n = 5 bits
    │ │ └ the first 1 ends the zeros
    │ └ zeros: as many as the level has factors 0.1, here one
    └ sign, where there are negative numbers            level = +10⁻¹ · (0.1 + 0.9 · (f + 1) / 2ⁿ) = 0.083125

So 1 and -1 are levels, and the largest number of each block is kept as it is. (Both ends of a power of 10 can't be
levels of it: its lower end is the upper one of the next. The authors' own tables have the middles between, and 1 but
not -1: with them a block shrinks each time it is packed while its extreme is negative.) Of numbers that are never below
0 the sign's bit is one more of the fraction. Of these none but 0 becomes 0: an Adam step is divided by the root of one.

Two things are other than in the paper, so that a state has the same bits in each way of cutting a model:

    blocks   of 16 elements, not 2,048: parameters begin at multiples of 16 in every buffer, and the cuts of ZeRO, tiles
             and offloaded pieces are multiples of 16, so each block is whole everywhere. Parts of tensor parallelism
             have the same blocks where their rows are multiples of 16 long, and otherwise blocks of their own.
    packing  what was unpacked packs to the same values again: a state may leave as float32 arrays, Adam's own, and come
             back.

In blocks as small as these an evenly spaced code would do nearly as well: on the handwritten digits it puts a step of
Adam's off by 1.4 %, this one by 1.0 %. Where a block has numbers of several powers of ten, only this one keeps those
that are small. It takes time: on one core 10⁶ parameters take Adam 8 ms instead of 1.4. On a GPU Adam's kernel unpacks
and packs in registers, to the same bytes (kernels/packing.py).

The scale isn't rounded to 16 bits, which would spare one bit in ten: Adam's v shrinks by a thousandth per step, less
than bfloat16 can tell, and a block's largest would never shrink at all.

The paper leaves embeddings their 32 bits: they are a group of their own then, {"params": …, "state_bits": 32}.

Sources: Dettmers et al. 2022, "8-bit optimizers via block-wise quantization", 1.3 and 2; Dettmers 2016, "8-bit
approximations for parallelism in deep learning" (the code); Li et al. 2023, "Memory efficient optimizers with 4-bit
states" (why v is never rounded to 0).
"""

import functools

from ..backend import device_of, module_of, on, to, xp, zeros
from ..flat import ALIGN, round_up

BLOCK = ALIGN       # elements that share a scale
ONE = 0x3F800000    # the bits of a float32's 1
CUT = 12            # bits of a float32 that the search for its level leaves out: 12 significant ones are looked at


def dynamic_levels(signed):
    """The level of each code, float32 (256,), from the bits as above: of code 0, and of -0, it is 0."""
    bits = 7 if signed else 8
    positive = [0.0]
    for code in range(1, 2 ** bits):
        n = code.bit_length() - 1       # bits of the fraction, behind the indicator
        fraction, zeros_before = code - 2 ** n, bits - 1 - n
        positive.append(10.0 ** -zeros_before * (0.1 + 0.9 * (fraction + 1) / 2 ** n))
    return xp.array(positive + [-level for level in positive] if signed else positive, xp.float32)


def nearest_codes(levels, signed):
    """By the upper 20 bits of a float32 from -1 to 1: the code of the level next to it, uint8 (2²⁰,)."""
    positive = levels[:128] if signed else levels
    between = (positive[1:].astype(xp.float64) + positive[:-1]) / 2
    if not signed:
        between[0] = 0      # above it, level 1
    codes = xp.full(1 << 31 - CUT, len(between), xp.uint8)          # of 1, and of NaN, which the scale makes NaN again
    below = xp.arange(ONE >> CUT, dtype=xp.uint32) << CUT
    codes[:len(below)] = xp.searchsorted(between, (below | 1 << CUT - 1).view(xp.float32))      # by a cell's middle
    codes[0] = 0
    return xp.concatenate([codes, codes | 0x80 if signed else xp.zeros_like(codes)])


@functools.cache
def tables(signed, device):
    """(dynamic_levels, nearest_codes) on a device."""
    with on(device):
        levels = dynamic_levels(signed)
        return to(levels, device), to(nearest_codes(levels, signed), device)


class Packed:
    """Numbers in 8 bits each, and a scale per BLOCK of them; 1-d.

    codes   uint8, as many as `size` and up to the end of the last block, where they are 0
    scales  a block's largest |value|, in the values' dtype, float32 or float64; NaN where one of them is inf or NaN:
            then all of the block unpack to NaN
    size    how many numbers there are
    signed  whether some are below 0; else all must be 0 or above

    packed[start:stop] is a view: start must begin a block (ValueError), and what lies between stop and the end of its
    block is padding.
    """

    def __init__(self, codes, scales, size, signed):
        self.codes, self.scales, self.size, self.signed = codes, scales, size, signed

    @classmethod
    def full(cls, size, value, dtype, device, signed):
        """So many numbers of one value."""
        blocks = round_up(size, BLOCK) // BLOCK
        packed = cls(zeros(blocks * BLOCK, xp.uint8, device), zeros(blocks, dtype, device), size, signed)
        if value:
            packed.pack(zeros(size, dtype, device) + value)
        return packed

    dtype = property(lambda self: self.scales.dtype, doc="Of the values.")
    shape = property(lambda self: (self.size,))
    arrays = property(lambda self: (self.codes, self.scales), doc="What they are kept in.")
    nbytes = property(lambda self: self.codes.nbytes + self.scales.nbytes, doc="Of all that is kept.")

    def moved(self, move):
        """The same with its arrays as move(array) gives them."""
        return Packed(*map(move, self.arrays), self.size, self.signed)

    def __getitem__(self, part):
        start, stop, step = part.indices(self.size)
        if start % BLOCK or step != 1:
            raise ValueError(f"a part of packed numbers begins at a multiple of {BLOCK}, with step 1: got "
                             f"[{start}:{stop}:{step}]")
        first, last = start // BLOCK, round_up(max(stop, start), BLOCK) // BLOCK
        return Packed(self.codes[first * BLOCK:last * BLOCK], self.scales[first:last], max(stop - start, 0),
                      self.signed)

    def unpack(self, out=None):
        """The values, (size,). out: an array to write them to."""
        levels, _ = tables(self.signed, device_of(self.codes))
        values = levels[self.codes.astype(xp.intp)].reshape(-1, BLOCK) * self.scales[:, None]
        if out is None:
            return values.reshape(-1)[:self.size]
        out[...] = values.reshape(-1)[:self.size]
        return out

    def pack(self, values):
        """Keep other values, (size,), in place: of each the level next to it. What unpack has given comes out again."""
        _, codes = tables(self.signed, device_of(self.codes))
        values = values.astype(self.dtype, copy=False)
        if padding := self.codes.size - self.size:
            values = module_of(values).concatenate([values, zeros(padding, values.dtype, device_of(values))])
        largest = xp.absolute(values)
        while largest.size > self.scales.size:      # 16 → 8 → 4 → 2 → 1 of each block; NaN stays NaN
            largest = xp.maximum(largest[::2], largest[1::2])
        self.scales[...] = xp.where(xp.isfinite(largest), largest, xp.nan)
        shares = values.reshape(-1, BLOCK) / xp.where(self.scales == 0, 1, self.scales)[:, None]
        cells = shares.astype(xp.float32, copy=False).reshape(-1).view(xp.uint32) // (1 << CUT)
        if not self.signed:     # a share may be 0 in float32, or in the bits that are looked at
            cells = xp.maximum(cells, values != 0)
        self.codes[...] = codes[cells.astype(xp.intp)]

    def __repr__(self):
        return f"Packed({self.size} numbers{'' if self.signed else ' from 0 up'}, {self.dtype}, {self.nbytes:,} bytes)"


def arrays_of(array):
    """The arrays that a state array, packed or not, is kept in."""
    return array.arrays if isinstance(array, Packed) else (array,)


def values_of(array):
    """A state array's values: of one that is packed a new array, else itself."""
    return array.unpack() if isinstance(array, Packed) else array
