"""Instructions in which the lanes of a warp, or of four, work together: shuffles, sums, matrices.

Fragments as tables: which lane's which register holds which element of a tile. A register of 32 bits holds e = 2
numbers of 16 bits or one of tf32; g = lane // 4, c = lane % 4:

    A (16, k)   register r: row g + 8·(r % 2), columns 4e·(r // 2) + e·c … + e - 1
    B (k, 8)    register r: rows 4e·r + e·c … + e - 1, column g
    C (16, 8)   register r: row g + 8·(r // 2), column 2c + r % 2

Sums are float32's in NumPy's order; tensor cores have another, and keep fewer bits of small terms.
Source: PTX ISA, sections on mma, ldmatrix and wgmma; canonical layouts of wgmma's tiles also as CUTLASS writes them
(mma_sm90_desc.hpp).
"""

import numpy as np

from .arithmetic import F32, TYPES, U32, widened
from .lanes import Unknown

LANE = np.arange(32)
G, C = LANE // 4, LANE % 4
WIDTH = {"f16": 2, "bf16": 2, "tf32": 4}


def numbers(registers, kind):
    """float32 (…, e) of registers of 32 bits (…): the numbers in them, the lowest first."""
    bits = np.ascontiguousarray(registers, U32)[..., None]
    if kind == "tf32":
        return (bits & 0xffffe000).view(F32)            # 10 bits of mantissa
    halves = bits.view(np.uint16)
    return widened(halves) if kind == "bf16" else halves.view(TYPES["f16"]).astype(F32)


def a_tile(registers, kind):
    """(warps, 16, k) of A's registers (count, warps, 32)."""
    e = 4 // WIDTH[kind]
    count, warps, _ = registers.shape
    tile = np.empty((warps, 16, 2 * e * count), F32)
    for r, values in enumerate(numbers(registers, kind)):
        for i in range(e):
            tile[:, G + 8 * (r % 2), 4 * e * (r // 2) + e * C + i] = values[..., i]
    return tile


def b_tile(registers, kind):
    """(warps, k, 8) of B's registers (count, warps, 32)."""
    e = 4 // WIDTH[kind]
    count, warps, _ = registers.shape
    tile = np.empty((warps, 4 * e * count, 8), F32)
    for r, values in enumerate(numbers(registers, kind)):
        for i in range(e):
            tile[:, 4 * e * r + e * C + i, G] = values[..., i]
    return tile


def c_registers(tile):
    """(registers, warps, 32) of tiles (warps, 16, n), n a multiple of 8: C's registers, 4 for each 8 columns."""
    n = tile.shape[2]
    return np.stack([tile[:, G + 8 * (r // 2), first + 2 * C + r % 2] for first in range(0, n, 8) for r in range(4)])


def c_tile(registers):
    """The way back."""
    count, warps, _ = registers.shape
    tile = np.empty((warps, 16, 2 * count), F32)
    for r, values in enumerate(registers):
        tile[:, G + 8 * (r % 4 // 2), 8 * (r // 4) + 2 * C + r % 2] = values
    return tile


def mma(kind, a, b, c):
    """C's registers (4, warps, 32) float32 of a·b + c: registers of A (uint32), B and C (float32)."""
    return c_registers(np.matmul(a_tile(a, kind), b_tile(b, kind)) + c_tile(c))


def shuffled(mode, values, b, c):
    """(values from the lanes asked for, whether each was in its segment): values (warps, 32); b, c likewise or one."""
    b, c = np.broadcast_to(b, values.shape).astype(np.int64), np.broadcast_to(c, values.shape).astype(np.int64)
    clamp, segment = c & 0x1f, c >> 8 & 0x1f
    first, last = LANE & segment, (LANE & segment) | (clamp & ~segment)
    b = b & 0x1f
    source = {"up": LANE - b, "down": LANE + b, "bfly": LANE ^ b, "idx": first | (b & ~segment)}[mode]
    inside = source >= last if mode == "up" else source <= last
    return np.take_along_axis(values, np.where(inside, source, LANE), 1), inside


REDUCED = {"add": np.add.reduce, "min": np.minimum.reduce, "max": np.maximum.reduce, "and": np.bitwise_and.reduce,
           "or": np.bitwise_or.reduce, "xor": np.bitwise_xor.reduce}


class Descriptor:
    """wgmma's description of a tile in shared memory, a 64-bit number that all lanes of four warps share.

    start     its first address
    leading, stride   bytes from one core matrix to the next, in the two directions
    swizzle   bytes of a row within which groups of 16 are exchanged: 128, 64, 32, or 16: none
    """

    def __init__(self, bits):
        self.start = (bits & 0x3fff) << 4
        self.leading, self.stride = (bits >> 16 & 0x3fff) << 4, (bits >> 32 & 0x3fff) << 4
        self.swizzle = (16, 128, 64, 32)[bits >> 62]
        if bits >> 49 & 7:
            raise Unknown(f"the emulator knows no wgmma descriptor with base offset {bits >> 49 & 7}")

    def addresses(self, outer, k, itemsize, along_k):
        """Addresses of the elements (outer, k). along_k: whether neighbours in k are neighbours in memory."""
        i, j = np.arange(outer)[:, None], np.arange(k)[None, :]
        row = self.swizzle // itemsize             # numbers in a row of the pattern
        if along_k and self.swizzle == 16:
            at = i // 8 * self.stride + i % 8 * 16 + j // row * self.leading + j % row * itemsize
        elif along_k:
            at = i // 8 * self.stride + i % 8 * self.swizzle + j * itemsize
        elif self.swizzle == 16:
            at = i // row * self.stride + i % row * itemsize + j // 8 * self.leading + j % 8 * 16
        else:
            at = i // row * self.leading + i % row * itemsize + j // 8 * self.stride + j % 8 * self.swizzle
        at = at + self.start
        return at ^ (at >> 3 & (self.swizzle - 16))


def as_numbers(bits, kind):
    """float32 of shared memory's bits, uint16 or uint32."""
    if kind == "tf32":
        return (bits & 0xffffe000).view(F32)
    return widened(bits) if kind == "bf16" else bits.view(TYPES["f16"]).astype(F32)


def wgmma(a, b, c, keep):
    """C's registers (count, warps, 32) of a·b + c: a (groups, 64, k), b (groups, k, n) float32; keep: (groups,) bool:
    whether c counts."""
    groups, _, n = b.shape
    before = c_tile(c).reshape(groups, 64, n)
    total = np.matmul(a, b) + np.where(keep[:, None, None], before, F32.type(0))
    return c_registers(total.reshape(4 * groups, 16, n))

