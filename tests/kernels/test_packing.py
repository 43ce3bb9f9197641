"""Packing inside of kernels: the bytes that optim.packed makes of the same numbers, in all 2²⁰ cells, and back."""

import numpy as np
import pytest
import triton
import triton.language as tl

from minitorch_dist import kernels
from minitorch_dist.kernels.kernel import Kernel
from minitorch_dist.kernels.packing import pack, unpack
from minitorch_dist.optim.adam import every_level
from minitorch_dist.optim.packed import BLOCK, ONE, Packed

each_sign = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
GUARD = 64      # elements before and behind what is written


@triton.jit
def _packing(values, codes, scales, unpacked, levels, n, SIGNED: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    places, blocks = first + tl.arange(0, BLOCK), first // 16 + tl.arange(0, BLOCK // 16)
    new, largest = pack(tl.load(values + places, mask=places < n, other=0.0), SIGNED)
    tl.store(codes + places, new, mask=places < n)
    tl.store(scales + blocks, largest, mask=blocks < n // 16)
    tl.store(unpacked + places, unpack(new, largest, levels), mask=places < n)


PACKING = Kernel("packing", _packing, {"values": "*fp32", "codes": "*u8", "scales": "*fp32", "unpacked": "*fp32",
                                       "levels": "*fp32", "n": "i32"}, {"SIGNED": True, "BLOCK": 2048}, num_warps=8)


def by_kernel(module, values, signed):
    """(codes, scales, the values that these mean) of NumPy's values, by a kernel on numpy's or cupy's arrays."""
    levels = module.asarray(every_level("cpu")[0 if signed else 256:][:256])
    wholes = [module.full(2 * GUARD + size, 77, dtype) for size, dtype in (
        (values.size, np.uint8), (values.size // BLOCK, np.float32), (values.size, np.float32))]
    inner = [whole[GUARD:-GUARD] for whole in wholes]
    block = 16384 if module is np else 2048     # as many as a GPU's registers hold
    PACKING((-(-values.size // block),), module.asarray(values), *inner, levels, values.size, SIGNED=signed,
            BLOCK=block)
    for whole in wholes:
        assert (whole[:GUARD] == 77).all() and (whole[-GUARD:] == 77).all()
    return [array if module is np else array.get() for array in inner]


def check(module, values, signed):
    """Codes, scales and values have the CPU's bits; what was unpacked packs to the same values."""
    values = np.concatenate([values, np.zeros(-values.size % BLOCK)]).astype(np.float32)
    wanted = Packed.full(values.size, 0, values.dtype, "cpu", signed)
    wanted.pack(values)
    found = by_kernel(module, values, signed)
    for got, want in zip(found, (*wanted.arrays, wanted.unpack()), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
    numbers = np.isfinite(found[2])
    np.testing.assert_array_equal(np.signbit(found[2])[numbers], np.signbit(wanted.unpack())[numbers])
    again = by_kernel(module, found[2], signed)
    wanted.pack(wanted.unpack())        # to the same codes, but that of subnormal numbers several mean one value
    for got, want in zip(again, (*wanted.arrays, found[2]), strict=True):
        np.testing.assert_array_equal(got, want)


def check_every_cell(module, signed):
    """Every share from 0 to 1 by its upper 20 bits, the others drawn; each block has a 1, so that they are shares."""
    random = np.random.default_rng(3)
    cells = np.arange(ONE >> 12, dtype=np.uint32) << 12
    cells = np.append(cells, np.zeros(-cells.size % 15, np.uint32)).reshape(-1, 15)
    shares = (cells | random.integers(0, 1 << 12, cells.shape, np.uint32)).view(np.float32)
    for sign in (1, -1) if signed else (1,):
        check(module, np.concatenate([np.ones((len(cells), 1)), sign * shares], 1).ravel(), signed)


def blocks(signed, count=201):
    """Numbers over up to 12 powers of ten, at sizes from the largest float32 down to its subnormal numbers."""
    random = np.random.default_rng(count)
    for size in (1e38, 1e20, 1.0, 1e-20, 1e-35, 1e-38, 1e-41, 1e-44):
        values = random.uniform(-1, 1, BLOCK * count) * 10.0 ** random.uniform(-12, 0, BLOCK * count) * size
        yield values if signed else np.abs(values)
    tiny = np.finfo(np.float32).smallest_subnormal
    for most in (1, 2, 3, 5, 30, 700, 9000):
        yield random.integers(-most if signed else 0, most + 1, 800) * float(tiny)
    yield np.zeros(40)
    yield -np.zeros(40)
    yield np.ones(40) * (-1 if signed else 1)
    yield np.where(np.arange(48) == 20, np.finfo(np.float32).max, 1e-3)


def check_odd_blocks(module, signed):
    """What can stand in a block beside usual numbers."""
    for values in blocks(signed):
        check(module, values, signed)
    usual = np.abs(np.random.default_rng(1).standard_normal(80))
    for odd in (np.inf, np.nan, *((-np.inf, -0.0) if signed else ())):
        values = np.where(np.arange(80) == 37, odd, usual)
        check(module, values, signed)
        assert np.isnan(by_kernel(module, values.astype("f4"), signed)[2]).sum() == (0 if odd == 0 else BLOCK)


INTERPRETED = pytest.mark.skipif(not kernels.interpreting(), reason="Triton compiles in this process")


@INTERPRETED
@each_sign
def test_every_cell_goes_to_the_code_of_the_table(signed):
    check_every_cell(np, signed)


@INTERPRETED
@each_sign
def test_odd_blocks(signed):
    check_odd_blocks(np, signed)


@INTERPRETED
def test_nothing_above_0_becomes_0_without_a_sign():
    values = np.array([1, 1e-9, 1e-30, 1e-45, 0] + [0] * 11, np.float32)
    codes, scales, unpacked = by_kernel(np, values, False)
    assert codes[:6].tolist() == [255, 1, 1, 1, 0, 0] and scales == 1 and unpacked[3] == np.float32(1e-7)
    assert by_kernel(np, values, True)[0][:6].tolist() == [127, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("fused", [(), ("line",), ("count",), ("line", "count")], ids=" ".join)
@each_sign
def test_a_cell_s_middle_is_so_far_from_a_middle_between_levels_that_roundings_don_t_matter(signed, fused):
    """The formula of packing.py in NumPy, with a·b + c rounded once or twice, as a GPU may: by 9 roundings at least."""
    down, count = 1 - 6e-7, np.full(ONE >> 12, 64 if signed else 128, np.float32)
    x = (np.arange(ONE >> 12, dtype=np.uint32) << 12 | 1 << 11).view(np.float32)
    for bound, factor, fewer in ((1e-4, 1e4, 16), (1e-2, 1e2, 4), (1e-1, 10, 2)):
        low = x <= np.float32(bound)
        x, count = np.where(low, x * np.float32(factor), x), np.where(low, count / np.float32(fewer), count)

    def line(x, a, b, once):
        if once:
            return (x.astype("f8") * a + np.float64(b)).astype(np.float32)
        return x * a + b
    y = line(count, line(x, np.float32(down / 0.9), np.float32(down * (1 - 0.1 / 0.9)), "line" in fused),
             np.float32(-0.5), "count" in fused).astype("f8")
    lowest = count >= (1 if signed else 2)      # below it others decide
    assert (np.abs(y - np.round(y)) > 9 * 2.0 ** -24 * (y + 0.5))[lowest].all()
