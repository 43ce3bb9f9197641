"""The emulated GPU on what the compiler of CUDA C++ writes, in PTX by hand: structures, blocks, variables."""

import numpy as np
import pytest

from minitorch_dist.kernels.emulator import EmulationError, Unknown, aligned, execute
from minitorch_dist.kernels.emulator.machine import Code
from minitorch_dist.kernels.emulator.ptx import parse

RNG = np.random.default_rng(0)
REGISTERS = ".reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<30>; .reg .b64 %rd<30>; .reg .f64 %fd<9>;"


def kernel(parameters, body, before=""):
    """A Code. In its body %r0 is the thread's number along x, and %rd0 the same times 4."""
    body = f"mov.u32 %r0, %tid.x; mul.wide.u32 %rd0, %r0, 4; {body} ret;"
    return Code(parse(f".version 8.8\n{before} .visible .entry k({parameters}) {{ {REGISTERS} {body} }}"))


OUT = "ld.param.u64 %rd1, [out]; add.s64 %rd1, %rd1, %rd0;"      # %rd1: the address of a thread's own element


# --- parameters -------------------------------------------------------------------------------------------------------


STRUCTURE = np.dtype([("pointer", "u8"), ("size", "i4"), ("small", "i1"), ("more", "f4"), ("pair", "u4", 2)],
                     align=True)


def test_parameters_that_are_structures():
    code = kernel(f".param .u64 out, .param .align 8 .b8 given[{STRUCTURE.itemsize}], .param .s8 last", """
        ld.param.u64 %rd1, [out]; ld.param.u64 %rd2, [given]; ld.param.u32 %r1, [given+8]; ld.param.s8 %r2, [given+12];
        ld.param.f32 %r3, [given+16]; ld.param.v2.u32 {%r4, %r5}, [given+20]; ld.param.s8 %r6, [last];
        ld.global.u32 %r7, [%rd2]; st.global.v4.b32 [%rd1], {%r1, %r2, %r3, %r4};
        st.global.v2.b32 [%rd1+16], {%r5, %r6}; st.global.b32 [%rd1+24], %r7;""")
    program = code.program
    assert program.parameters == {"out": "u64", "given": "b8[32]", "last": "s8"}
    assert [program.size(name) for name in program.parameters] == [8, 32, 1]
    out, there = aligned(np.zeros(7, "u4")), np.array([77], "u4")
    given = np.array((there.ctypes.data, -5, -3, 1.5, (8, 9)), STRUCTURE)
    execute(code, (1,), 32, {"out": out, "given": np.frombuffer(given.tobytes(), "u1"), "last": np.int8(-2)},
            lent=[there])
    assert out.tolist() == [2 ** 32 - 5, 2 ** 32 - 3, 0x3fc00000, 8, 9, 2 ** 32 - 2, 77]
    with pytest.raises(EmulationError, match="reads 4 bytes at 0x0, "):       # what isn't given is zeros
        execute(code, (1,), 32, {"out": out})


# --- blocks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 10, 32, 45])
def test_blocks_of_any_number_of_threads(threads):
    """The lanes that fill the last warp do nothing, and nobody waits for them at a barrier."""
    code = kernel(".param .u64 out", OUT + """mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mul.lo.u32 %r3, %r1, %r2;
        mul.wide.u32 %rd2, %r3, 4; add.s64 %rd1, %rd1, %rd2; shl.b32 %r4, %r0, 2; mov.u32 %r5, near;
        add.u32 %r6, %r5, %r4; st.shared.u32 [%r6], %r0; bar.sync 0; sub.u32 %r7, %r2, 1; shl.b32 %r8, %r7, 2;
        sub.u32 %r8, %r8, %r4; add.u32 %r8, %r8, %r5; ld.shared.u32 %r9, [%r8]; st.global.u32 [%rd1], %r9;""",
                  ".extern .shared .align 4 .b8 near[];")
    out = np.zeros((3, threads), "u4")
    counts = execute(code, (3,), threads, {"out": out}, shared=4 * threads)
    np.testing.assert_array_equal(out, np.tile(np.arange(threads)[::-1], (3, 1)))
    assert counts.diverged == 0 and counts.threads == threads and counts.barriers == 3
    assert counts.access("global store").bytes == out.nbytes


def test_blocks_of_three_dimensions():
    code = kernel(".param .u64 out", """ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.y; mov.u32 %r2, %tid.z;
        mov.u32 %r3, %ntid.x; mov.u32 %r4, %ntid.y; mov.u32 %r5, %ntid.z; mad.lo.u32 %r6, %r2, %r4, %r1;
        mad.lo.u32 %r6, %r6, %r3, %r0; mul.wide.u32 %rd2, %r6, 4; add.s64 %rd1, %rd1, %rd2;
        mad.lo.u32 %r7, %r5, 10, %r2; mad.lo.u32 %r7, %r7, 10, %r1; mad.lo.u32 %r7, %r7, 10, %r0;
        st.global.u32 [%rd1], %r7;""")
    out = np.zeros((3, 2, 7), "u4")
    execute(code, (1,), (7, 2, 3), {"out": out})
    z, y, x = np.indices(out.shape)
    np.testing.assert_array_equal(out, 3000 + 100 * z + 10 * y + x)


# --- variables --------------------------------------------------------------------------------------------------------


SHARED = """.extern .shared .align 16 .b8 more[]; .visible .shared .align 4 .u32 few[3]; .shared .align 8 .b8 none[99];
    .shared .align 8 .f64 one;"""


def test_variables_in_shared_memory():
    """Each has its place, and what a launch asks for is behind them; those of other kernels take none."""
    code = kernel(".param .u64 out", """.shared .align 1 .b8 own[5]; ld.param.u64 %rd1, [out];
        mov.u32 %r1, few; mov.u64 %rd2, one; mov.u32 %r3, own; mov.u32 %r4, more; cvt.u32.u64 %r2, %rd2;
        st.global.v4.u32 [%rd1], {%r1, %r2, %r3, %r4};
        st.shared.u32 [few+8], 7; st.shared.f64 [one], 0d3FF0000000000000;
        st.shared.u8 [own+4], 9; st.shared.u32 [more], 11; ld.shared.u32 %r5, [%r1+8]; ld.shared.f64 %fd1, [%rd2];
        ld.shared.u8 %r6, [%r3+4]; ld.shared.u32 %r7, [%r4]; cvt.rni.u32.f64 %r8, %fd1;
        st.global.v4.u32 [%rd1+16], {%r5, %r8, %r6, %r7};""", SHARED)
    assert code.program.shared == 32            # 12, 4 that nobody has, 8, 5, 3 that nobody has
    out = aligned(np.zeros(8, "u4"))
    execute(code, (1,), 32, {"out": out}, shared=4)
    assert (out[:4] - out[0]).tolist() == [0, 16, 24, 32] and out[4:].tolist() == [7, 1, 9, 11]
    with pytest.raises(EmulationError, match="writes 4 bytes at 32 of a program's 32 bytes of shared memory"):
        execute(code, (1,), 32, {"out": out})


def test_variables_that_a_text_begins_with():
    """A table in memory, of numbers of any width, and a counter that stays from launch to launch."""
    code = kernel(".param .u64 out", OUT + """mov.u64 %rd2, words; add.s64 %rd3, %rd2, %rd0; ld.global.u32 %r1, [%rd3];
        ld.const.s16 %r2, [halves+2]; ld.global.u32 %r3, [count]; add.u32 %r3, %r3, 1; st.global.u32 [count], %r3;
        ld.const.f64 %fd1, [one+8]; cvt.rni.u32.f64 %r4, %fd1; add.u32 %r1, %r1, %r2; add.u32 %r1, %r1, %r4;
        st.global.u32 [%rd1], %r1;""",
                  """.global .align 4 .b8 words[16] = {0, 1, 0, 0, 0, 0, 2, 0, 255, 255, 255, 255, 3};
        .const .align 2 .s16 halves[2] = {5, -9}; .visible .global .u32 count = 40; .global .u32 unused = 0;
        .const .align 8 .f64 one[2] = {0d0000000000000000, 0d4059000000000000};""")
    assert set(code.tables) == {"words", "halves", "count", "one"}
    for launch in (41, 42):
        out = np.zeros(4, "u4")
        counts = execute(code, (1,), 4, {"out": out})
        assert out.tolist() == [(n + 91) % 2 ** 32 for n in (256, 2 << 16, -1, 3)]
        assert code.tables["count"].view("u4") == launch and counts.read["words"] == 32
    with pytest.raises(EmulationError, match="thread 4: reads 4 bytes at 0x.*, 16 bytes into words, which has 16"):
        execute(code, (1,), 5, {"out": np.zeros(5, "u4")})
    with pytest.raises(EmulationError, match="thread 0: writes to fixed, an array that is read-only"):
        execute(kernel(".param .u64 out", "mov.u64 %rd2, fixed; st.global.u32 [%rd2], 1;", ".const .u32 fixed = 1;"),
                (1,), 1, {"out": np.zeros(1, "u4")})


OWN = """.local .align 8 .b8 __local_depot0[24]; .reg .b64 %SP; .reg .b64 %SPL; mov.u64 %SPL, __local_depot0;
    cvta.local.u64 %SP, %SPL; add.u64 %rd2, %SP, 8; cvta.to.local.u64 %rd3, %rd2;"""


def test_memory_of_a_threads_own():
    """Nobody else sees it; it begins as NaN, and its end is checked."""
    code = kernel(".param .u64 out, .param .u32 at", OUT + OWN + """ld.param.u32 %r1, [at]; mul.wide.u32 %rd4, %r1, 4;
        add.s64 %rd4, %rd3, %rd4; ld.local.f32 %r2, [%rd3]; setp.nan.f32 %p1, %r2, %r2; st.local.u32 [%rd3], %r0;
        st.local.u32 [%rd4], 1000; ld.local.u32 %r3, [%rd3]; ld.local.u32 %r4, [%SPL+12]; add.u32 %r3, %r3, %r4;
        @!%p1 mov.u32 %r3, 0; setp.eq.u32 %p2, %r0, 3; @%p2 ret; st.global.u32 [%rd1], %r3;""")
    assert code.program.local == 24
    out = np.full(40, 7, "u4")
    execute(code, (1,), 40, {"out": out, "at": np.uint32(1)})
    assert out.tolist() == [7 if n == 3 else n + 1000 for n in range(40)]
    with pytest.raises(EmulationError, match="thread 0: writes 4 bytes at 24 of a thread's 24 bytes of memory of its"):
        execute(code, (1,), 40, {"out": out, "at": np.uint32(4)})
    with pytest.raises(EmulationError, match="reads 4 bytes at -4 of a thread's 24 bytes of memory of its own"):
        execute(kernel(".param .u64 out", OWN + "ld.local.u32 %r1, [%SPL+-4];"), (1,), 1, {"out": out})
    with pytest.raises(EmulationError, match="writes 8 bytes at 4 of a thread's"):
        execute(kernel(".param .u64 out", OWN + "st.local.u64 [%SPL+4], %rd2;"), (1,), 1, {"out": out})


def test_an_address_says_which_memory_it_is_in():
    """Lanes of one instruction look into three of them."""
    code = kernel(".param .u64 out", OUT + OWN + """.shared .align 4 .u32 one; mov.u64 %rd5, one;
        cvta.shared.u64 %rd5, %rd5; ld.param.u64 %rd6, [out]; rem.u32 %r1, %r0, 3; setp.eq.u32 %p1, %r1, 0;
        setp.eq.u32 %p2, %r1, 1; setp.eq.u32 %p3, %r0, 0; @%p3 st.shared.u32 [one], 5; st.u32 [%rd2], %r0;
        selp.b64 %rd7, %rd5, %rd2, %p1; selp.b64 %rd7, %rd6, %rd7, %p2; ld.u32 %r2, [%rd7]; @!%p2 st.u32 [%rd7], 11;
        ld.u32 %r3, [%rd7]; mad.lo.u32 %r2, %r2, 100, %r3; setp.ne.u32 %p4, %r0, 0; @%p4 st.u32 [%rd1], %r2;""")
    out = np.full(10, 8, "u4")
    execute(code, (1,), 10, {"out": out})
    assert out.tolist() == [8, 808, 211, 511, 808, 511, 511, 808, 811, 511]


def test_atomics_in_shared_memory():
    """Those of several warps don't race with each other, but with what isn't atomic."""
    body = OUT + """.shared .align 8 .u32 sums[2]; mov.u32 %r1, sums; cvt.u64.u32 %rd2, %r1; cvta.shared.u64 %rd2, %rd2;
        setp.eq.u32 %p1, %r0, 0; @%p1 st.shared.v2.u32 [sums], {5, 0}; bar.sync 0; atom.shared.add.u32 %r2, [sums], 1;
        atom.max.u32 %r3, [%rd2+4], %r0; atom.shared.cas.b32 %r4, [sums+4], 69, 100; {}
        ld.shared.v2.u32 {{%r5, %r6}}, [sums]; mad.lo.u32 %r5, %r6, 1000, %r5; st.global.u32 [%rd1], %r5;"""
    body = body.replace("{5, 0}", "{{5, 0}}")
    out = np.zeros(70, "u4")
    execute(kernel(".param .u64 out", body.format("bar.sync 0;")), (1,), 70, {"out": out})
    assert out.tolist() == [100_075] * 70
    with pytest.raises(EmulationError, match="reads byte 0 of shared memory, which several warps wrote .* a race"):
        execute(kernel(".param .u64 out", body.format("")), (1,), 70, {"out": out})
    for before in ("st.shared.u32 [sums], %r0", "ld.shared.u32 %r7, [sums]"):
        text = body.format("bar.sync 0;").replace("atom.shared.add", f"setp.lt.u32 %p2, %r0, 32; @%p2 {before};"
                                                  "atom.shared.add", 1)
        if "st." in before:
            text = text.replace("[sums], %r0", "[sums], 5")
        with pytest.raises(EmulationError, match="changes byte 0 of shared memory, which warp 0 .* a race"):
            execute(kernel(".param .u64 out", text), (1,), 70, {"out": out})


def test_atomic_sums_of_subnormal_numbers():
    """They are kept in shared memory, where global memory's are zeros (PTX ISA, atom)."""
    code = kernel(".param .u64 out", OUT + """.shared .align 4 .f32 sum; st.shared.u32 [sum], 1; mov.u64 %rd2, sum;
        atom.add.f32 %r1, [%rd2], 0f00000002; atom.global.add.f32 %r2, [%rd1], 0f00000002; ld.shared.u32 %r3, [sum];
        st.global.u32 [%rd1+4], %r3;""")
    out = np.array([1, 0], "u4")
    execute(code, (1,), 1, {"out": out})
    assert out.tolist() == [0, 3]


# --- arithmetic -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["u32", "s64"])
def test_numbers_of_several_registers(kind):
    """Sums, differences, and products of two words with a third and fourth added, against Python's integers."""
    word = int(kind[1:])
    text = """ld.param.u64 %rd20, [x]; mul.wide.u32 %rd21, %r0, WORDS; add.s64 %rd20, %rd20, %rd21;
        ld.param.u64 %rd22, [out]; mul.wide.u32 %rd23, %r0, RESULTS; add.s64 %rd22, %rd22, %rd23;"""
    names = [f"%rd{i}" if word == 64 else f"%r{i}" for i in range(1, 16)]
    a, b, c, d, e, f, *rest = names
    text += "".join(f"ld.global.{kind} {name}, [%rd20+{i * word // 8}];" for i, name in enumerate(names[:6]))
    results = f"""add.cc.K {rest[0]}, {a}, {d}; addc.cc.K {rest[1]}, {b}, {e}; addc.K {rest[2]}, {c}, {f};
        sub.cc.K {rest[3]}, {a}, {d}; subc.cc.K {rest[4]}, {b}, {e}; subc.K {rest[5]}, {c}, {f};
        mad.lo.cc.U {rest[6]}, {a}, {b}, {c}; madc.hi.cc.U {rest[7]}, {a}, {b}, {d}; addc.U {rest[8]}, {e}, 0;"""
    text += results.replace("K", kind).replace("U", "u" + kind[1:])
    text += "".join(f"st.global.{kind} [%rd22+{i * word // 8}], {name};" for i, name in enumerate(rest[:9]))
    text = text.replace("WORDS", str(6 * word // 8)).replace("RESULTS", str(9 * word // 8))
    mask = 2 ** word - 1
    x = RNG.integers(0, 256, (45, 6 * word // 8)).astype("u1").view(f"u{word // 8}")
    x[:20] = RNG.choice(np.array([0, 1, mask >> 1, mask], x.dtype), (20, 6))
    out = np.zeros((45, 9), x.dtype)
    execute(kernel(".param .u64 x, .param .u64 out", text), (1,), 45, {"x": x, "out": out})

    def words(n):
        return [n >> word * i & mask for i in range(3)]

    for row, got in zip(x.tolist(), out.tolist(), strict=True):
        a, b, c, d, e, f = row
        first, second = (p + (q << word) + (r << 2 * word) for p, q, r in ((a, b, c), (d, e, f)))
        assert got == words(first + second) + words(first - second) + words(a * b + c + (d << word) + (e << 2 * word))


def test_carries_are_of_each_lane():
    """Lanes that part between two instructions keep their own."""
    code = kernel(".param .u64 out", OUT + """sub.u32 %r1, 0, %r0; add.cc.u32 %r2, %r1, 5; setp.lt.u32 %p1, %r0, 3;
        @%p1 bra $few; addc.u32 %r3, 100, 0; add.cc.u32 %r4, 0xffffffff, 1; bra $on;
        $few: addc.u32 %r3, 200, 0; $on: st.global.u32 [%rd1], %r3;""")
    out = np.zeros(10, "u4")
    execute(code, (1,), 10, {"out": out})
    assert out.tolist() == [(200 if n < 3 else 100) + (0 < n <= 5) for n in range(10)]


def test_narrow_integers_fill_the_register():
    code = kernel(".param .u64 out", OUT + """sub.u32 %r1, %r0, 200; cvt.s8.s32 %rs1, %r1; cvt.u8.u32 %rs2, %r1;
        cvt.s32.s16 %r2, %rs1; cvt.u32.u16 %r3, %rs2; mad.lo.s32 %r2, %r2, 1000, %r3; st.global.u32 [%rd1], %r2;""")
    out = np.zeros(100, "i4")
    execute(code, (1,), 100, {"out": out})
    n = np.arange(100, dtype="i4") - 200
    np.testing.assert_array_equal(out, n.astype("i1").astype("i4") * 1000 + n.astype("u1"))


# --- functions --------------------------------------------------------------------------------------------------------


FUNCTIONS = """.func (.param .b32 func_retval0) twice(.param .b32 twice_param_0);
    .func (.param .b32 func_retval0) twice(.param .b32 twice_param_0) { .reg .b32 %r<3>;
        ld.param.u32 %r1, [twice_param_0]; add.u32 %r2, %r1, %r1; st.param.b32 [func_retval0], %r2; ret; }
    .func (.param .align 8 .b8 func_retval0[16]) steps(.param .b32 steps_param_0, .param .b64 steps_param_1)
        { .local .align 4 .b8 __local_depot1[8]; .reg .pred %p<3>; .reg .b64 %r<4>; .reg .b32 %rd<9>;
        ld.param.u32 %rd1, [steps_param_0]; ld.param.u64 %r1, [steps_param_1]; mov.u64 %r2, __local_depot1;
        st.local.u32 [%r2+4], %rd1; mov.u32 %rd2, 0;
        $again: setp.le.u32 %p1, %rd1, 1; @%p1 bra $done; and.b32 %rd3, %rd1, 1; setp.eq.u32 %p1, %rd3, 0;
        @%p1 bra $even; mad.lo.u32 %rd1, %rd1, 3, 1; bra $on; $even: shr.u32 %rd1, %rd1, 1;
        $on: add.u32 %rd2, %rd2, 1; setp.gt.u32 %p2, %rd2, 90; @!%p2 bra $again;
        st.param.b32 [func_retval0], 999; st.param.b64 [func_retval0+8], %r1; ret;
        $done: { .reg .b32 temp; .param .b32 param0; st.param.b32 [param0+0], %rd2; .param .b32 retval0;
        call.uni (retval0), twice, (param0); ld.param.b32 %rd4, [retval0+0]; }
        ld.local.s32 %r3, [%r2+4]; cvt.u32.u64 %rd5, %r3; add.u32 %rd4, %rd4, %rd5;
        st.param.b32 [func_retval0+0], %rd4;
        st.param.b64 [func_retval0+8], %r1; ret; }
    .func for_ever(.param .b32 for_ever_param_0) { .param .b32 param0; call.uni for_ever, (param0); ret; }"""


def test_functions():
    """Called twice by some of a warp's lanes, which go ways of their own in it; in it another one is called; names of
    registers, of which some have another width there, labels, and memory are each call's own."""
    call = """{{ .param .b32 param0; st.param.b32 [param0+0], {0}; .param .b64 param1; st.param.b64 [param1+0], %rd0;
        .param .align 8 .b8 retval0[16]; call.uni (retval0), steps, (param0, param1);
        ld.param.b32 %r5, [retval0+0]; ld.param.b64 %rd5, [retval0+8]; }}"""
    code = kernel(".param .u64 out", OUT + "mov.u32 %r1, 7; mov.u32 %r5, 0; rem.u32 %r2, %r0, 3;"
                  "setp.eq.u32 %p1, %r2, 1; @%p1 bra $again;" + call.format("%r0")
                  + "mov.u32 %r6, %r5;" + call.format("%r6") + """
        cvt.u32.u64 %r7, %rd5; add.u32 %r5, %r5, %r7; mad.lo.u32 %r5, %r6, 10000, %r5;
        $again: add.u32 %r5, %r5, %r1; st.global.u32 [%rd1], %r5;""", FUNCTIONS)
    out = np.zeros(45, "u4")
    execute(code, (1,), 45, {"out": out})

    def steps(n):
        count, given = 0, n
        while n > 1 and count <= 90:
            n, count = (3 * n + 1 if n % 2 else n // 2), count + 1
        return 999 if n > 1 else 2 * count + given
    assert out.tolist() == [7 if n % 3 == 1 else 7 + 10000 * steps(n) + steps(steps(n)) + 4 * n for n in range(45)]
    assert 999 in map(steps, range(45))


@pytest.mark.parametrize("text", ["call.uni for_ever, (param0)", "call.uni elsewhere, (param0)",
                                  "call.uni twice, (param0)", "call.uni (%r1), %rd1, (param0)"])
def test_calls_that_are_refused(text):
    """Of itself, of what has no text or other parameters, of an address."""
    with pytest.raises(Unknown, match="doesn't know"):
        execute(kernel(".param .u64 out", "{ .param .b32 param0; st.param.b32 [param0], 1; " + text + "; }", FUNCTIONS),
                (1,), 1, {"out": np.zeros(1, "u4")})


def test_a_text_of_several_kernels():
    text = "".join(f""".visible .entry k{n}(.param .u64 k{n}_param_0) {{ .reg .b64 %rd<2>;
        ld.param.u64 %rd1, [k{n}_param_0]; st.global.u32 [%rd1], {n}; ret; }}""" for n in (5, 6))
    for name, number in ((None, 5), ("k5", 5), ("k6", 6)):
        out = np.zeros(1, "u4")
        program = parse(text, name)
        execute(Code(program), (1,), 1, {"out": out})
        assert out == number and program.name == f"k{number}"
    with pytest.raises(ValueError, match="the PTX has no .entry k7, but k5, k6"):
        parse(text, "k7")
