"""The emulated GPU by itself, on PTX written by hand: arithmetic, branches, barriers, memory's checks, the counts."""

import math
from fractions import Fraction

import numpy as np
import pytest

from minitorch_dist.backend import as_dtype
from minitorch_dist.kernels.emulator import EmulationError, Unknown, aligned, execute, machine
from minitorch_dist.kernels.emulator.arithmetic import TYPES, fused, narrowed, operation
from minitorch_dist.kernels.emulator.machine import Code
from minitorch_dist.kernels.emulator.ptx import parse

RNG = np.random.default_rng(0)
EVERY = 0xffffffff


def run(body, threads=32, grid=(1,), shared=0, **arrays):
    """Run PTX with an address parameter per array: %x0 … hold them, %lane the thread's number, %at 4 times that."""
    parameters = ", ".join(f".param .u64 {name}" for name in arrays)
    loads = "\n".join(f"ld.param.u64 %x{i}, [{name}];" for i, name in enumerate(arrays))
    text = (f".visible .entry k({parameters}) {{ .reg .pred %p<9>; .reg .b32 %r<30>; .reg .b32 %lane;"
            f".reg .b64 %x<30>; .reg .b64 %at; .reg .b64 %d<9>; {loads}"
            f"mov.u32 %lane, %tid.x; mul.wide.u32 %at, %lane, 4; {body} ret; }}")
    return execute(Code(parse(text)), grid, threads, arrays, shared)


def scalar(opcode, *values):
    """An instruction of numbers."""
    types, function = operation(tuple(opcode.split(".")))
    with np.errstate(all="ignore"):
        return function(*(np.array([v], t) for v, t in zip(values, types, strict=True)))[0]


# --- arithmetic -------------------------------------------------------------------------------------------------------


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


def test_bfloat16_is_rounded_as_its_own_type_does():
    x = np.concatenate([RNG.standard_normal(500).astype("f4") * np.float32(10.0) ** RNG.integers(-38, 38, 500),
                        np.array([0, -0.0, np.inf, -np.inf, 3.4e38, 1.00390625, 1.01171875, 1e-40], "f4")])
    np.testing.assert_array_equal(narrowed(x), x.astype(as_dtype("bfloat16")).view("u2"))


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


def test_comparisons_and_nan():
    for name, ordered, other in (("lt", True, False), ("ge", False, False), ("ne", True, False), ("ltu", True, True),
                                 ("geu", False, True), ("neu", True, True), ("num", True, False),
                                 ("nan", False, True), ("equ", False, True)):
        assert scalar(f"setp.{name}.f32", 1.0, 2.0) == ordered, name
        assert scalar(f"setp.{name}.f32", 1.0, np.nan) == other, name
    assert scalar("setp.lt.and.s32", -1, 1, False) == 0 and scalar("setp.lt.or.u32", 5, 1, True) == 1
    assert scalar("max.f32", 1.0, np.nan) == 1 and np.isnan(scalar("max.NaN.f32", 1.0, np.nan))
    assert scalar("mul.ftz.f32", 1e-30, 1e-10) == 0 and scalar("mul.f32", 1e-30, 1e-10) > 0
    assert scalar("fma.rn.bf16x2", 0x3f803f80, 0x40004000, 0x3f800000) == 0x40404000      # 1·2 + 1, 1·2 + 0


def test_what_it_has_not_learnt_is_refused():
    for text in ("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 512", "add.rz.f64 %x1, %x2, %x3",
                 "setp.lt.s32 %p1|%p2, %r1, %r2", "bar.sync 1, 64"):
        with pytest.raises(Unknown, match="doesn't know"):
            run(text + ";", out=np.zeros(32, "f4"))


# --- branches and barriers --------------------------------------------------------------------------------------------


def test_lanes_that_part_meet_again():
    """Collatz: each lane has another number of steps; behind the loop all lanes of the warp add over the warp."""
    out, total = np.zeros(64, "i4"), np.zeros(64, "i4")
    run("""add.u32 %r1, %lane, 1; mov.u32 %r2, 0;
        $again: setp.eq.u32 %p1, %r1, 1; @%p1 bra $done;
            add.u32 %r2, %r2, 1; and.b32 %r3, %r1, 1; setp.eq.u32 %p2, %r3, 1; @%p2 bra $odd;
            shr.u32 %r1, %r1, 1; bra.uni $again;
        $odd: mad.lo.u32 %r1, %r1, 3, 1; bra $again;
        $done: add.s64 %x2, %x0, %at; st.global.u32 [%x2], %r2;
        redux.sync.add.s32 %r4, %r2, 0xffffffff; add.s64 %x2, %x1, %at; st.global.u32 [%x2], %r4;""",
        threads=64, out=out, total=total)

    def steps(n):
        return 0 if n == 1 else 1 + steps(3 * n + 1 if n % 2 else n // 2)
    np.testing.assert_array_equal(out, [steps(n + 1) for n in range(64)])
    np.testing.assert_array_equal(total.reshape(2, 32), np.repeat(out.reshape(2, 32).sum(1)[:, None], 32, 1))


def test_shuffles():
    """Against the definition, lane by lane, of segments of 8 lanes too."""
    for mode, b, c in (("bfly", 5, 31), ("down", 3, 31), ("up", 2, 0), ("idx", 9, 31), ("bfly", 4, 0x181f),
                       ("down", 3, 0x181f), ("up", 3, 0x1800), ("idx", 6, 0x181f)):
        values, valid = np.zeros(32, "u4"), np.zeros(32, "u4")
        run(f"""mul.lo.u32 %r1, %lane, 10; shfl.sync.{mode}.b32 %r2|%p1, %r1, {b}, {c}, 0xffffffff;
            selp.u32 %r3, 1, 0, %p1; add.s64 %x2, %x0, %at; st.global.u32 [%x2], %r2;
            add.s64 %x2, %x1, %at; st.global.u32 [%x2], %r3;""", values=values, valid=valid)
        segment, clamp = c >> 8, c & 31
        for lane in range(32):
            low = lane & segment
            high = low | clamp & ~segment
            source = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": low | b & ~segment}[mode]
            inside = source >= high if mode == "up" else source <= high
            assert (values[lane], valid[lane]) == (10 * (source if inside else lane), inside), (mode, lane)


def test_part_of_a_warp_at_an_instruction_of_the_whole():
    with pytest.raises(EmulationError, match="program 0, thread 0: an instruction of the whole warp is reached by a"):
        run("setp.lt.u32 %p1, %lane, 7; @%p1 shfl.sync.bfly.b32 %r1, %lane, 1, 31, 0xffffffff;", out=np.zeros(1, "f4"))


SUM = """mov.u32 %r9, memory; shl.b32 %r1, %lane, 2; add.u32 %r1, %r1, %r9; add.u32 %r2, %lane, 1;
    st.shared.u32 [%r1], %r2; bar.sync 0;
    setp.ne.u32 %p1, %lane, 0; @%p1 bra $out; mov.u32 %r3, 0; mov.u32 %r4, 0;
    $next: ld.shared.u32 %r5, [%r9]; add.u32 %r3, %r3, %r5; add.u32 %r9, %r9, 4; add.u32 %r4, %r4, 1;
        setp.lt.u32 %p2, %r4, 96; @%p2 bra $next;
    mov.u32 %r6, %ctaid.x; mul.wide.u32 %x2, %r6, 4; add.s64 %x2, %x0, %x2; st.global.u32 [%x2], %r3; $out:"""


def test_shared_memory_behind_a_barrier():
    out = np.zeros(5, "i4")
    counts = run(SUM, threads=96, grid=(5,), shared=384, out=out)
    assert (out == 96 * 97 // 2).all() and counts.barriers == 5


def test_without_the_barrier_it_is_a_race():
    with pytest.raises(EmulationError, match=r"reads byte 128 of shared memory, which warp 1 wrote with no barrier"):
        run(SUM.replace("bar.sync 0;", ""), threads=96, shared=384, out=np.zeros(5, "i4"))


def test_two_warps_that_write_the_same_do_no_harm_and_others_race():
    text = "mov.u32 %r1, memory; st.shared.u32 [%r1], {};"
    run(text.format(7), threads=64, shared=4, out=np.zeros(1, "f4"))
    with pytest.raises(EmulationError, match="with no barrier between: a race"):
        run("shr.u32 %r2, %lane, 5;" + text.format("%r2"), threads=64, shared=4, out=np.zeros(1, "f4"))


def test_threads_that_have_ended_are_not_waited_for():
    out = np.zeros(96, "i4")
    run("""setp.ge.u32 %p1, %lane, 70; @%p1 bra $end; bar.sync 0; setp.lt.u32 %p1, %lane, 9; @%p1 ret; bar.sync 0;
        add.s64 %x2, %x0, %at; st.global.u32 [%x2], %lane; $end:""", threads=96, out=out)
    lanes = np.arange(96)
    np.testing.assert_array_equal(out, np.where((lanes >= 9) & (lanes < 70), lanes, 0))


def test_a_loop_without_end(monkeypatch):
    monkeypatch.setattr(machine, "MOST", 100)
    with pytest.raises(EmulationError, match="thread 3: still runs after 100 blocks"):
        run("setp.lt.u32 %p1, %lane, 3; $spin: @!%p1 bra $spin;", out=np.zeros(1, "f4"))
    with pytest.raises(EmulationError, match=r"thread 5: reaches a trap \(@%p1 trap\)"):
        run("setp.eq.u32 %p1, %lane, 5; @%p1 trap;", out=np.zeros(1, "f4"))


# --- memory -----------------------------------------------------------------------------------------------------------


def test_an_address_outside_of_every_array():
    x, out = np.arange(32, dtype="f4"), np.zeros(31, "f4")
    with pytest.raises(EmulationError, match=r"thread 31: writes 4 bytes at 0x\w+, 124 bytes into out, which has 124"):
        run("add.s64 %x2, %x0, %at; ld.global.b32 %r1, [%x2]; add.s64 %x2, %x1, %at; st.global.b32 [%x2], %r1;",
            x=x, out=out)
    with pytest.raises(EmulationError, match=r"thread 0: reads 4 bytes at 0x\w+, 4 bytes before x, which has 128"):
        run("add.s64 %x2, %x0, %at; ld.global.b32 %r1, [%x2 + -4];", x=aligned(x))


def test_an_address_that_is_no_multiple():
    with pytest.raises(EmulationError, match=r"thread 1: reads 8 bytes at 0x\w+, no multiple of 8"):
        run("add.s64 %x2, %x0, %at; ld.global.v2.b32 {%r1, %r2}, [%x2];", x=aligned(np.zeros(99, "f4")))


def test_an_array_that_may_not_be_written():
    x = np.zeros(32, "f4")
    x.flags.writeable = False
    with pytest.raises(EmulationError, match="writes to x, an array that is read-only"):
        run("add.s64 %x2, %x0, %at; st.global.b32 [%x2], %lane;", x=x)


def test_shared_memory_has_an_end_and_begins_as_nan():
    out = np.zeros(32, "f4")
    run("mov.u32 %r1, memory; ld.shared.b32 %r2, [%r1]; add.s64 %x2, %x0, %at; st.global.b32 [%x2], %r2;", shared=4,
        out=out)
    assert np.isnan(out).all()
    with pytest.raises(EmulationError, match="thread 1: reads 4 bytes at 4 of a program's 4 bytes of shared memory"):
        run("mov.u32 %r1, memory; shl.b32 %r2, %lane, 2; add.u32 %r1, %r1, %r2; ld.shared.b32 %r2, [%r1];", shared=4,
            out=out)


def test_atomics_are_one_after_the_other():
    out, before = np.zeros(1, "i4"), np.zeros(64, "i4")
    run("atom.global.add.u32 %r1, [%x0], 3; add.s64 %x2, %x1, %at; st.global.u32 [%x2], %r1;", threads=64, out=out,
        before=before)
    assert out == 192 and sorted(before) == list(range(0, 192, 3))


COPY = """mov.u32 %r1, memory; shl.b32 %r2, %lane, 2; add.u32 %r1, %r1, %r2; add.s64 %x2, %x0, %at;
    setp.lt.u32 %p1, %lane, 20; selp.u32 %r3, 4, 0, %p1;
    cp.async.ca.shared.global [%r1], [%x2], 4, %r3; cp.async.commit_group;
    {} ld.shared.b32 %r4, [%r1]; add.s64 %x2, %x1, %at; st.global.b32 [%x2], %r4; {}"""


def test_copies_land_when_they_are_waited_for():
    x, out = np.arange(32, dtype="f4") + 1, np.zeros(32, "f4")
    run(COPY.format("cp.async.wait_group 0;", ""), shared=128, x=x, out=out)
    np.testing.assert_array_equal(out, np.where(np.arange(32) < 20, x, 0))
    for wait in ("", "cp.async.wait_group 1;"):
        with pytest.raises(EmulationError, match="reads byte 0 of shared memory, to which cp.async still copies"):
            run(COPY.format(wait, ""), shared=128, x=x, out=out)


def test_the_older_of_two_groups():
    second = "cp.async.ca.shared.global [%r1 + 128], [%x2], 4; cp.async.commit_group; cp.async.wait_group 1;"
    x, out = np.arange(32, dtype="f4"), np.zeros(32, "f4")
    with pytest.raises(EmulationError, match="thread 0: ends while its copies are under way"):
        run(COPY.format(second, ""), shared=256, x=x, out=out)
    run(COPY.format(second, "cp.async.wait_all;"), shared=256, x=x, out=out)
    np.testing.assert_array_equal(out[:20], x[:20])


# --- counts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stride, first, sectors", [(1, 0, 4), (2, 0, 8), (3, 0, 12), (8, 0, 32), (32, 0, 32),
                                                    (0, 0, 1), (1, 1, 5)])
def test_sectors_of_a_warp(stride, first, sectors):
    """32 lanes of 4 bytes: 128 bytes are 4 sectors if they lie together; every 8th number has one of its own."""
    counts = run(f"mul.wide.u32 %d1, %lane, {4 * stride}; add.s64 %d1, %d1, %x0;"
                 f"ld.global.b32 %r1, [%d1 + {4 * first}];", x=aligned(np.zeros(2000, "f4")))
    one = counts.access("global load")
    lanes = 1 if stride == 0 else 32
    assert (one.requests, one.bytes, one.units, one.least) == (1, 4 * lanes, sectors, math.ceil(lanes / 8))
    assert counts.read == {"x": 32 * sectors} and counts.written == {}


@pytest.mark.parametrize("stride, waves", [(1, 1), (2, 2), (3, 1), (4, 4), (16, 16), (32, 32), (33, 1), (0, 1)])
def test_bank_conflicts_of_a_warp(stride, waves):
    """Lane i wants word i·stride of 32 banks: gcd(stride, 32) lanes meet in one, but where all want the same word."""
    counts = run(f"mov.u32 %r1, memory; mul.lo.u32 %r2, %lane, {4 * stride}; add.u32 %r1, %r1, %r2; "
                 "ld.shared.b32 %r3, [%r1];", shared=4400, out=np.zeros(1, "f4"))
    one = counts.access("shared load")
    assert (one.requests, one.bytes, one.units, one.least) == (1, 128, waves, 1)


def test_wide_accesses_take_a_wavefront_per_128_bytes():
    for width, phases in ((2, 2), (4, 4)):
        registers = ", ".join(f"%r{i}" for i in range(10, 10 + width))
        counts = run(f"mov.u32 %r1, memory; mul.lo.u32 %r2, %lane, {4 * width}; add.u32 %r1, %r1, %r2; "
                     f"st.shared.v{width}.b32 [%r1], {{{registers}}};", shared=512, out=np.zeros(1, "f4"))
        one = counts.access("shared store")
        assert (one.units, one.least) == (phases, phases)


def test_operations_are_those_of_active_lanes():
    counts = run("""setp.lt.u32 %p1, %lane, 5; mov.b32 %r1, 0f3F800000; fma.rn.f32 %r2, %r1, %r1, %r1;
        @!%p1 bra $end; add.f32 %r2, %r2, %r1; add.f32 %r2, %r2, %r1; $end:""", threads=64, grid=(3,),
                 out=np.zeros(1, "f4"))
    assert counts.flops["cuda"] == 3 * (2 * 64 + 2 * 5) and counts.diverged == 3


def test_types_of_the_table_have_their_widths():
    assert all(dtype.itemsize == 1 if name == "pred" else 8 * dtype.itemsize == int(name.lstrip("busfp"))
               for name, dtype in TYPES.items())
