"""What the emulated GPU computes lane by lane, against Python's integers and fractions."""

import math
from fractions import Fraction

import numpy as np
import pytest

from minitorch_dist.backend import as_dtype
from minitorch_dist.kernels.emulator.arithmetic import TYPES, fused, narrowed, operation

RNG = np.random.default_rng(0)
EVERY = 0xffffffff


def scalar(opcode, *values):
    """An instruction of numbers."""
    types, function = operation(tuple(opcode.split(".")))
    with np.errstate(all="ignore"):
        return function(*(np.array([v], t) for v, t in zip(values, types, strict=True)))[0]


def nearest(x):
    """float32 of a Fraction, rounded once: the nearest of the neighbours of a first guess, ties to even."""
    guess = np.float32(float(x))
    around = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf))]
    return min(around, key=lambda y: (abs(Fraction(float(y)) - x), int(y.view(np.uint32)) & 1))


def test_fma_rounds_once():
    a, b, c = RNG.standard_normal((3, 2000)).astype("f4")
    c[:500] *= np.float32(2.0) ** RNG.integers(-30, 30, 500)
    # Just below a tie: a·b is half a unit of c's last place less a part that float64's sum has no room for, so that
    # rounding twice goes up to even; and the same with the signs the other way round.
    k, hard = RNG.integers(1, 200, 200), slice(500, 700)
    a[hard], b[hard] = np.float32(2.0) ** -24 * (1 + k * 2.0 ** -23), 1 - k * 2.0 ** -23
    c[hard] = 1 + (2 * RNG.integers(0, 2 ** 21, 200) + 1) * 2.0 ** -23
    a[600:700], c[600:700] = -a[600:700], -c[600:700]
    tiny = slice(1900, 2000)        # subnormal results
    a[tiny] *= np.float32(2) ** -70
    b[tiny] *= np.float32(2) ** -70
    c[tiny] *= np.float32(2) ** -138
    got = fused(a, b, c)
    wanted = [nearest(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))
              for x, y, z in zip(a, b, c, strict=True)]
    np.testing.assert_array_equal(got, np.array(wanted, "f4"))
    twice = (a.astype("f8") * b + c).astype("f4")
    assert (twice != got)[hard].all() and np.isclose(twice, got, rtol=1e-6).all()


@pytest.mark.parametrize("rounding", ["rm", "rp", "rz"])
def test_directed_rounding(rounding):
    """The result is on the right side of the exact one, and its neighbour beyond."""
    a, b, c = RNG.standard_normal((3, 500)).astype("f4")
    c[:250] *= np.float32(2.0) ** RNG.integers(-70, 70, 250)       # the product or the addend is far below a unit
    operands = {"fma": (a, b, c), "mul": (a, b), "add": (a, c), "sub": (a, c)}
    exact = {"fma": lambda x, y, z: x * y + z, "mul": lambda x, y: x * y, "add": lambda x, y: x + y,
             "sub": lambda x, y: x - y}
    for name, values in operands.items():
        got = operation((name, rounding, "f32"))[1](*values)
        assert got.dtype == np.float32
        for result, *xs in zip(got, *values, strict=True):
            true = exact[name](*(Fraction(float(x)) for x in xs))
            side = 1 if rounding == "rm" or rounding == "rz" and true > 0 else -1
            beyond = np.nextafter(result, np.float32(side * np.inf))
            assert side * Fraction(float(result)) <= side * true < side * Fraction(float(beyond)), (name, xs)


@pytest.mark.parametrize("rounding", ["rn", "rm", "rp", "rz"])
def test_fma_of_float64_rounds_once(rounding):
    """Against fractions: where products cancel but for what they have lost, at ties, of every size; zeros."""
    a, b, c = RNG.standard_normal((3, 700))
    c[:100] = -(a * b)[:100]                                                # the result is what the product has lost
    c[100:300] *= 2.0 ** RNG.integers(-120, 120, 200)
    k = RNG.integers(1, 200, 100)
    a[300:400], b[300:400] = 2.0 ** -53 * (1 + k * 2.0 ** -52), 1 - k * 2.0 ** -52      # just below half a unit
    c[300:400] = RNG.choice([1, -1], 100) * (1 + (2 * RNG.integers(0, 2 ** 50, 100) + 1) * 2.0 ** -52)
    a[400:500], b[400:500] = (x * 2.0 ** RNG.integers(-530, 500, 100) for x in (a[400:500], b[400:500]))
    c[400:500] *= 2.0 ** RNG.integers(-1070, 1000, 100)
    a[500:600] *= 2.0 ** -500
    b[500:600] *= 2.0 ** -560
    c[500:600] *= 2.0 ** RNG.integers(-1074, -1050, 100)                    # subnormal results
    a[600:620], c[620:640], b[640:660], c[640:660] = 0, 0, 0, 0
    a[660:], b[660:], c[660:] = a[660:] * 2.0 ** 512, b[660:] * 2.0 ** 511, c[660:] * 2.0 ** 1022       # some overflow
    types, function = operation(("fma", rounding, "f64"))
    with np.errstate(all="ignore"):
        got = function(a, b, c)
    assert types == (np.float64,) * 3 and np.isinf(got).any() == (rounding != "rz")
    for x, y, z, result in zip(a.tolist(), b.tolist(), c.tolist(), got, strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        side = {"rm": -1, "rp": 1, "rz": -1 if exact > 0 else 1}.get(rounding)
        if rounding == "rn":
            try:
                assert result == float(exact)
            except OverflowError:
                assert result == (math.inf if exact > 0 else -math.inf)
            continue
        if math.isinf(result):
            assert abs(exact) > Fraction(np.finfo("f8").max) and (result > 0) == (side > 0) == (exact > 0)
            continue
        beyond = math.nextafter(result, -side * math.inf)
        assert side * (Fraction(float(result)) - exact) >= 0
        assert math.isinf(beyond) or side * (Fraction(float(beyond)) - exact) < 0
    assert scalar("fma.rn.f64", np.inf, 2, 1) == np.inf and np.isnan(scalar("fma.rn.f64", np.inf, 0, 1))
    most = np.finfo("f8").max
    assert scalar(f"fma.{rounding}.f64", 2.0 ** 490, 2.0 ** 490, most) == (most if rounding in ("rm", "rz") else np.inf)
    one = function(np.float64(3), np.float64(2.0 ** 600), np.float64(1.5))          # numbers that all lanes share
    assert one == (math.nextafter(3 * 2.0 ** 600, math.inf) if rounding == "rp" else 3 * 2.0 ** 600)
    if rounding != "rn":
        assert scalar(f"add.{rounding}.f64", 1.0, 2.0 ** -80) == 1 + (rounding == "rp") * 2.0 ** -52
        assert scalar(f"mul.{rounding}.f64", 2.0 ** -600, 2.0 ** -600) == (5e-324 if rounding == "rp" else 0)
        assert scalar(f"mul.{rounding}.f32", 2.0 ** -100, 2.0 ** -100) == (2.0 ** -149 if rounding == "rp" else 0)
        third = scalar(f"mul.{rounding}.f64", 1 / 3, 3.0)
        assert third == (1 if rounding == "rp" else 1 - 2.0 ** -53)


def test_bfloat16_is_rounded_as_its_own_type_does():
    x = np.concatenate([RNG.standard_normal(500).astype("f4") * np.float32(10.0) ** RNG.integers(-38, 38, 500),
                        np.array([0, -0.0, np.inf, -np.inf, 3.4e38, 1.00390625, 1.01171875, 1e-40], "f4")])
    np.testing.assert_array_equal(narrowed(x), x.astype(as_dtype("bfloat16")).view("u2"))


def nearest_bfloat16(x):
    """bfloat16's bits of a Fraction, rounded once: the nearest, ties to even, of those around float32's first bits."""
    first = int(np.float32(float(x)).view("u4")) >> 16
    return min((first - 1, first, first + 1), key=lambda y: (
        abs(Fraction(float(np.uint32((y & 0xffff) << 16).view("f4"))) - x), y & 1))


def test_bfloat16_is_rounded_once_where_float32_lies_between():
    """Sums, integers and float64 near the middle of two bfloat16."""
    for a, b, c in ((0x3fc0, 0x3f81, 0xab80), (0x3fc0, 0x3f81, 0x2b80), (0xbfc0, 0x3f81, 0x2b80),
                    (0x3f83, 0x3fc0, 0xa000)):
        x, y, z = (Fraction(float(np.uint32(n << 16).view("f4"))) for n in (a, b, c))
        assert scalar("fma.rn.bf16", a, b, c) == nearest_bfloat16(x * y + z)
        assert scalar("fma.rn.bf16x2", a << 16, b, c << 16) >> 16 == nearest_bfloat16(z)
    for n in (0x40400001, 0x40400000, 0x403fffff, 0x40c00001, -0x40400001, 257, 259):
        assert scalar("cvt.rn.bf16.s32", n) == nearest_bfloat16(Fraction(n)), n
        for m in (n, n << 32, (n << 32) + 1, (n << 32) - 1):
            assert scalar("cvt.rn.bf16.s64", m) == nearest_bfloat16(Fraction(m)), m
        assert scalar("cvt.rn.bf16.f64", n / 2 ** 40) == nearest_bfloat16(Fraction(n, 2 ** 40))
    assert scalar("cvt.rn.bf16.f64", np.inf) == 0x7f80 and scalar("cvt.rn.bf16.f64", 1e39) == 0x7f80


def test_comparisons_are_answered_in_numbers():
    nan, one = 0x7fc0, 0x3f80
    assert [scalar("set.nan.bf16.bf16", x, 0) for x in (nan, one, 0)] == [one, 0, 0]
    assert scalar("set.lt.f16.f16", 1, 2) == 1 and scalar("set.lt.f32.s32", -1, -2) == 0
    assert scalar("set.geu.u32.f32", np.nan, 1) == EVERY and scalar("set.ge.s32.f32", np.nan, 1) == 0
    assert scalar("set.gt.s32.u32", EVERY, 1) == -1 and scalar("set.gt.ftz.s32.f32", 1e-40, 0) == 0
    assert operation(("set", "eq", "bf16x2", "bf16x2")) is None


def signed(x, width=32):
    return x - (1 << width) if x >> (width - 1) else x


WORDS = [0, 1, 5, 31, 32, 33, 0x7fffffff, 0x80000000, 0xdeadbeef, EVERY]


@pytest.mark.parametrize("a", WORDS)
def test_integers(a):
    for b in WORDS:
        s, t = signed(a), signed(b)
        assert scalar("mul.hi.u32", a, b) == a * b >> 32
        assert scalar("mul.wide.s32", s, t) == s * t
        assert int(scalar("mul.lo.s32", s, t)) & EVERY == s * t & EVERY
        assert scalar("mul.hi.u64", a << 31 | b, b << 30 | a) == (a << 31 | b) * (b << 30 | a) >> 64
        assert scalar("mul.hi.s64", s << 20, t << 25) == (s << 20) * (t << 25) >> 64
        assert scalar("shl.b32", a, b) == (a << b & EVERY if b < 32 else 0)
        assert scalar("shr.u32", a, b) == (a >> b if b < 32 else 0)
        assert scalar("shr.s32", s, b) == s >> min(b, 31)
        if b:
            assert scalar("div.u32", a, b) == a // b and scalar("rem.u32", a, b) == a % b
            if (s, t) != (-2 ** 31, -1):
                assert scalar("div.s32", s, t) == int(Fraction(s, t))
                assert scalar("rem.s32", s, t) == math.fmod(s, t)
        for first, length in ((0, 8), (3, 5), (28, 9), (31, 1), (4, 0), (0, 32)):
            bits = a >> first & (1 << length) - 1
            assert scalar("bfe.u32", a, first, length) == bits
            window = min(first + length, 32) - first
            if window > 0 and length:
                kept = bits & (1 << window) - 1
                assert scalar("bfe.s32", s, first, length) == signed(kept, window)
            mask = ((1 << length) - 1) << first & EVERY
            assert scalar("bfi.b32", a, b, first, length) == (b & ~mask & EVERY) | (a << first & mask)
        both = a | b << 32
        for selector in (0x3210, 0x7654, 0x0246, 0x89ab, 0xf0f0):
            out = 0
            for i in range(4):
                choice = selector >> 4 * i & 15
                byte = both >> 8 * (choice & 7) & 255
                out |= (255 * (byte >> 7) if choice & 8 else byte) << 8 * i
            assert scalar("prmt.b32", a, b, selector) == out
        for table in (0x80, 0xfe, 0x96, 0xca):
            c = (a * 77 + b) & EVERY
            wanted = sum((table >> ((a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1)) & 1) << i for i in range(32))
            assert scalar("lop3.b32", a, b, c, table) == wanted
        for n in (0, 7, 31, 32, 40):
            assert scalar("shf.l.wrap.b32", a, b, n) == (both << (n & 31)) >> 32 & EVERY
            assert scalar("shf.r.clamp.b32", a, b, n) == both >> min(n, 32) & EVERY
    assert scalar("popc.b32", a) == a.bit_count() and scalar("clz.b32", a) == 32 - a.bit_length()
    assert scalar("brev.b32", a) == int(f"{a:032b}"[::-1], 2)


def test_conversions():
    cases = [(2.5, 2, 2), (-2.5, -2, -2), (3.5, 4, 3), (1e20, 2 ** 31 - 1, 2 ** 31 - 1), (-1e20, -2 ** 31, -2 ** 31),
             (np.nan, 0, 0), (-0.5, 0, 0), (np.inf, 2 ** 31 - 1, 2 ** 31 - 1)]
    for x, even, cut in cases:
        assert scalar("cvt.rni.s32.f32", x) == even and scalar("cvt.rzi.s32.f32", x) == cut
    assert scalar("cvt.rzi.u32.f32", -3.0) == 0
    assert scalar("cvt.rn.f16x2.f32", 1.0, -2.0) == 0x3c00c000         # the first is above
    assert scalar("cvt.rn.bf16x2.f32", 1.0, -2.0) == 0x3f80c000
    assert scalar("cvt.rn.f32.u64", 2 ** 63) == 2.0 ** 63
    assert scalar("cvt.f32.bf16", 0x3fc0) == 1.5
    assert scalar("cvt.rna.tf32.f32", np.float32(1 + 2.0 ** -11)) == np.float32(1 + 2.0 ** -10).view("u4")
    assert scalar("cvt.rna.tf32.f32", np.uint32(EVERY).view("f4")) == 0x7fffffff
    assert scalar("cvt.rn.relu.bf16.f32", -1.0) == 0 and scalar("cvt.rn.relu.f16x2.f32", -1.0, 2.0) == 0x4000
    assert scalar("cvt.rn.ftz.f32.f64", 2.0 ** -130) == 0 and scalar("cvt.rn.f32.f64", 2.0 ** -130) > 0


def test_nan_as_an_integer():
    """0, but of 64 bits on either side the highest bit alone (PTX ISA, cvt)."""
    assert [scalar(f"cvt.rzi.{to}.f32", np.nan) for to in ("s32", "u32", "s16", "s64", "u64")] == [
        0, 0, 0, -2 ** 63, 2 ** 63]
    assert [scalar(f"cvt.rzi.{to}.f64", np.nan) for to in ("s32", "u32", "u64")] == [-2 ** 31, 2 ** 31, 2 ** 63]


def test_saturation_and_signs_of_zero():
    for name in ("add.sat.f32", "fma.rn.sat.f32", "cvt.sat.f32.f32"):
        operands = {"add": 1, "fma": 2, "cvt": 0}[name[:3]]
        for x, wanted in ((7.0, 1), (-7.0, 0), (0.25, 0.25), (np.nan, 0), (-0.0, 0)):
            got = scalar(name, x, *[1.0, -0.0][2 - operands:])
            assert got == wanted and not np.signbit(got), name
    assert scalar("add.sat.f16x2", 0x7e004500, 0) == 0x00003c00
    for low, high in ((-0.0, 0.0), (0.0, -0.0)):
        for more in ("", ".NaN"):
            signs = [np.signbit(scalar(f"{name}{more}.f32", low, high)) for name in ("min", "max")]
            assert signs == [True, False]


def test_functions_of_one_number():
    for name, function in (("ex2.approx", lambda x: 2 ** x), ("lg2.approx", math.log2), ("sin.approx", math.sin),
                           ("cos.approx", math.cos), ("tanh.approx", math.tanh), ("sqrt.rn", math.sqrt),
                           ("rsqrt.approx", lambda x: x ** -0.5), ("rcp.rn", lambda x: 1 / x)):
        for x in (0.375, 1.75, 2.5):
            assert math.isclose(scalar(f"{name}.f32", x), function(x), rel_tol=1e-6), name
    assert [scalar(f"cvt.{way}.s32.f32", -1.5) for way in ("rmi", "rpi", "rzi", "rni")] == [-2, -1, -1, -2]
    assert scalar("copysign.f32", -1.0, 2.0) == -2 and scalar("copysign.f32", 1.0, -2.0) == 2    # the first's sign
    assert scalar("abs.f32", -1.5) == 1.5 and scalar("neg.s32", 5) == -5


def test_comparisons_and_nan():
    for name, ordered, other in (("lt", True, False), ("ge", False, False), ("ne", True, False), ("ltu", True, True),
                                 ("geu", False, True), ("neu", True, True), ("num", True, False),
                                 ("nan", False, True), ("equ", False, True)):
        assert scalar(f"setp.{name}.f32", 1.0, 2.0) == ordered, name
        assert scalar(f"setp.{name}.f32", 1.0, np.nan) == other, name
    assert scalar("setp.lt.and.s32", -1, 1, False) == 0 and scalar("setp.lt.or.u32", 5, 1, True) == 1
    assert scalar("min.f32", np.nan, 1.0) == 1 and np.isnan(scalar("min.NaN.f32", np.nan, 1.0))
    assert scalar("max.f32", 1.0, np.nan) == 1 and np.isnan(scalar("max.NaN.f32", 1.0, np.nan))
    assert scalar("mul.ftz.f32", 1e-30, 1e-10) == 0 and scalar("mul.f32", 1e-30, 1e-10) > 0
    assert scalar("setp.gt.ftz.f32", 1e-40, 0.0) == 0 and scalar("setp.gt.f32", 1e-40, 0.0) == 1
    assert scalar("add.ftz.f16", 1e-7, 1e-7) == 0 and scalar("ex2.approx.ftz.bf16", 0xc302) == 0
    assert scalar("add.rn.ftz.f32x2", 0x00000001_3f800000, 0) == 0x3f800000
    assert scalar("fma.rn.bf16x2", 0x3f803f80, 0x40004000, 0x3f800000) == 0x40404000      # 1·2 + 1, 1·2 + 0


def test_types_of_the_table_have_their_widths():
    assert all(dtype.itemsize == 1 if name == "pred" else 8 * dtype.itemsize == int(name.lstrip("busfp"))
               for name, dtype in TYPES.items())


def test_gross_approximations_of_float64():
    """20 bits of mantissa, the rest zeros; subnormal numbers are 0."""
    for x in (3.0, -0.7, 1e300, 1e-300):
        for name, exact in (("rcp", 1 / x), ("rsqrt", abs(x) ** -0.5)):
            got = scalar(f"{name}.approx.ftz.f64", abs(x) if name == "rsqrt" else x)
            assert got.dtype == np.float64 and abs(got / exact - 1) < 2.0 ** -19
            assert int(got.view(np.uint64)) & 0xffffffff == 0
    assert scalar("rcp.approx.ftz.f64", -1e-310) == -np.inf and scalar("rcp.approx.ftz.f64", 1.5e308) == 0
