"""The emulated GPU on what the compiler of CUDA C++ writes, in PTX by hand: structures, blocks, variables."""

import numpy as np
import pytest

from minitorch_dist.kernels.emulator import EmulationError, aligned, execute
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
