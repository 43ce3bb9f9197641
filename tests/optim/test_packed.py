"""Numbers packed into 8 bits: the code read from its bits, the nearest level, and the same values again."""

from fractions import Fraction

import numpy as np
import pytest

from minitorch_dist.optim.packed import BLOCK, Packed, dynamic_levels, tables

pytestmark = pytest.mark.filterwarnings("error")        # dividing by a scale of 0, or NaN
each_sign = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])


def packed(values, signed=True):
    kept = Packed.full(len(values), 0, values.dtype, "cpu", signed)
    kept.pack(values)
    return kept


def level(code, signed):
    """What the paper says of the bits: a sign, zeros, a one, and a fraction."""
    text = format(code, "08b")
    sign, rest = (-1 if text[0] == "1" else 1, text[1:]) if signed else (1, text)
    if "1" not in rest:
        return Fraction(0)
    zeros, fraction = rest.index("1"), rest[rest.index("1") + 1:]
    share = Fraction(int(fraction, 2) + 1 if fraction else 1, 2 ** len(fraction))
    return sign * (Fraction(1, 10) + Fraction(9, 10) * share) / 10 ** zeros


@each_sign
def test_levels_are_read_from_the_codes_bits(signed):
    found, wanted = dynamic_levels(signed), [level(code, signed) for code in range(256)]
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.array([float(x) for x in wanted], np.float32))
    assert not signed or found[0b00111001] == np.float32(0.083125)      # as in the docstring
    # By power of ten: 1, 2, 4, … 64 levels of each sign, or up to 128 without one; the largest is 1 itself.
    positive = sorted(x for x in wanted if x > 0)
    decades = [sum(Fraction(1, 10 ** (d + 1)) < x <= Fraction(1, 10 ** d) for x in positive) for d in range(8)]
    assert decades == [64, 32, 16, 8, 4, 2, 1, 0] if signed else decades == [128, 64, 32, 16, 8, 4, 2, 1]
    assert positive[-1] == 1 and positive[0] == (Fraction(1, 10 ** 6) if signed else Fraction(1, 10 ** 7))
    assert sorted(-x for x in wanted if x < 0) == (positive if signed else [])


def numbers(signed, dtype, decades=6, blocks=300):
    random = np.random.default_rng(blocks)
    values = random.standard_normal(BLOCK * blocks) * 10.0 ** random.uniform(-decades, 0, BLOCK * blocks)
    return (values if signed else np.abs(values)).astype(dtype)


@each_sign
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_each_number_goes_to_the_level_next_to_it(signed, dtype):
    values = numbers(signed, dtype)
    levels = np.array([float(level(code, signed)) for code in range(256)])
    found = packed(values, signed).unpack().reshape(-1, BLOCK)
    for block, got in zip(values.reshape(-1, BLOCK).astype("f8"), found.astype("f8"), strict=True):
        scale = np.abs(block).max()
        off = np.abs(block[:, None] - levels * scale)
        if not signed:
            off[block > 0, 0] = np.inf      # the level 0 is 0's alone
        # Of a share 12 significant bits are looked at: just at the middle between two levels it may go to either.
        assert (np.abs(got - block) <= off.min(1) + 2.0 ** -11 * np.abs(block)).all()
        assert np.abs(got).max() == scale and (signed or (got[block > 0] > 0).all())


@each_sign
def test_a_cell_of_the_table_has_the_level_next_to_its_middle(signed):
    """A cell is what has the same 20 upper bits; the next one's begins 2¹² further."""
    cells = np.arange(1, 0x3F800, 31, dtype=np.uint32)      # from above 0 to below 1
    middles = ((cells << 12) + (1 << 11)).view(np.float32).astype("f8")
    levels, codes = tables(signed, "cpu")
    off = np.abs(middles[:, None] - levels[0 if signed else 1:].astype("f8"))       # without a sign 0 is 0's alone
    np.testing.assert_array_equal(np.abs(middles - levels[codes[cells]]), off.min(1))
    if signed:
        np.testing.assert_array_equal(levels[codes[cells + (1 << 19)]], -levels[codes[cells]])


@pytest.mark.parametrize("dtype, values", [("f4", [1e30, 1e-12, 1e-8, 0.0]), ("f8", [1e60, 1e-60, 1.0, 0.0])])
def test_nothing_above_0_becomes_0_however_far_below_the_largest(dtype, values):
    values = np.array(values, dtype)
    packed = Packed.full(4, 0, values.dtype, "cpu", signed=False)
    packed.pack(values)
    assert (packed.codes[:4] == [255, 1, 1, 0]).all() and not packed.unpack()[3]


def test_nothing_above_0_becomes_0_without_a_sign():
    values = np.array([1.0, 1e-9, 1e-30, -0.0] + [0.0] * 12, np.float32)
    assert packed(values, False).unpack()[:4].tolist() == [1.0, np.float32(1e-7), np.float32(1e-7), 0.0]
    assert packed(values, True).unpack()[:4].tolist() == [1.0, 0.0, 0.0, 0.0]


@each_sign
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_what_was_unpacked_packs_to_the_same_values(signed, dtype):
    """Of any size of numbers, those below the smallest normal one, too; a block's extreme may be negative."""
    random = np.random.default_rng(5)
    cases = [numbers(signed, dtype, 12) * 10.0 ** e for e in (0, -20, -35, -38, -40, -42, -44, 30)]
    tiny = np.finfo(dtype).smallest_subnormal
    cases += [random.integers(-most if signed else 0, most + 1, 800).astype(dtype) * tiny
              for most in (1, 2, 3, 5, 30, 700, 9000)]
    cases += [np.zeros(40, dtype), -np.ones(40, dtype) if signed else np.ones(40, dtype),
              np.where(np.arange(48) == 20, np.finfo(dtype).max, 1e-3).astype(dtype), numbers(signed, dtype)[:1],
              numbers(signed, dtype)[:37]]
    for values in cases:
        values = values.astype(dtype)
        kept = packed(values, signed)
        once = kept.unpack()
        assert once.dtype == dtype and once.shape == values.shape
        assert np.array_equal(np.abs(once).reshape(-1)[np.abs(values).argmax()], np.abs(values).max())
        kept.pack(once)
        assert np.array_equal(kept.unpack(), once)


def test_an_evenly_spaced_code_loses_what_is_small():
    """The median error of numbers over four powers of ten, each by its own size."""
    values = numbers(False, "f8", 4)

    def error(found):
        return np.median(np.abs(found - values) / values)
    scales = values.reshape(-1, BLOCK).max(1).repeat(BLOCK)
    assert error(packed(values, False).unpack()) < 0.02
    assert error(np.round(values / scales * 255) / 255 * scales) > 0.06


def test_what_it_takes():
    """10 bits each in float32: 8 of a code, 32 of a scale for 16."""
    assert packed(np.ones(1600, np.float32)).nbytes == 1600 * 10 // 8
    assert packed(np.ones(1601, np.float32)).nbytes == 1616 * 10 // 8


def test_parts_are_views_between_blocks():
    values = numbers(True, "f4", blocks=5)[:75]
    kept = packed(values)
    whole = kept.unpack()
    part = kept[32:53]
    assert (part.size, part.shape, kept[48:].size, kept[16:16].size) == (21, (21,), 27, 0)
    np.testing.assert_array_equal(part.unpack(), whole[32:53])
    part.pack(np.full(21, 3.0, np.float32))
    np.testing.assert_array_equal(kept.unpack()[:53], [*whole[:32], *[3.0] * 21])
    assert kept.codes[53:64].tolist() == [0] * 11       # what is between a part and the end of its block is padding
    for wrong in (slice(8, 32), slice(0, 32, 2)):
        with pytest.raises(ValueError, match="multiple of 16, with step 1: got"):
            kept[wrong]


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_inf_and_nan_become_no_number(bad):
    values = numbers(True, "f4", blocks=3)
    values[20] = bad
    kept = packed(values)
    found = kept.unpack()
    assert np.isnan(found[16:32]).all() and np.isfinite(found[:16]).all() and np.isfinite(found[32:]).all()
    kept.pack(found)
    np.testing.assert_array_equal(kept.unpack(), found)


def test_a_scale_is_as_exact_as_the_values():
    """Adam's v shrinks by a thousandth per step where no gradient comes: bfloat16 would leave it as it is."""
    kept, start = packed(np.array([1.0, 0.5, 1e-3], np.float32), False), packed(np.array([1, .5, 1e-3], "f4"), False)
    for _ in range(1000):
        kept.pack(kept.unpack() * np.float32(0.999))
    np.testing.assert_allclose(kept.unpack(), start.unpack() * 0.999 ** 1000, rtol=1e-4)


def test_the_table_is_made_once():
    assert tables(True, "cpu") is tables(True, "cpu") and tables(True, "cpu")[1].nbytes == 1 << 20
