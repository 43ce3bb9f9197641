"""The emulated GPU's memory, and what it counts of every access, on PTX written by hand."""

import math

import numpy as np
import pytest

from minitorch_dist.kernels.emulator import EmulationError, aligned

from .by_hand import run


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
    with pytest.raises(EmulationError, match="thread 9: writes to x, an array that is read-only"):
        run("setp.lt.u32 %p1, %lane, 9; selp.b64 %x2, %x1, %x0, %p1; add.s64 %x2, %x2, %at;"
            "st.global.b32 [%x2], %lane;", x=x, out=np.zeros(32, "f4"))


def test_shared_memory_has_an_end_and_begins_as_nan():
    out = np.zeros(32, "f4")
    run("mov.u32 %r1, memory; ld.shared.b32 %r2, [%r1]; add.s64 %x2, %x0, %at; st.global.b32 [%x2], %r2;", shared=4,
        out=out)
    assert np.isnan(out).all()
    with pytest.raises(EmulationError, match="thread 1: reads 4 bytes at 4 of a program's 4 bytes of shared memory"):
        run("mov.u32 %r1, memory; shl.b32 %r2, %lane, 2; add.u32 %r1, %r1, %r2; ld.shared.b32 %r2, [%r1];", shared=4,
            out=out)


def test_narrow_loads_fill_the_register():
    """With the sign where the type has one."""
    x, out = np.array([-2, 250], "i2").view("u1"), np.zeros((3, 32), "u4")
    run("".join(f"ld.global.{kind} %r1, [%x0]; add.s64 %x2, %x1, %at; st.global.u32 [%x2 + {128 * i}], %r1;"
                for i, kind in enumerate(("s8", "u8", "s16"))), x=aligned(x), out=out)
    np.testing.assert_array_equal(out[:, 0], [2 ** 32 - 2, 254, 2 ** 32 - 2])


def test_atomics_are_one_after_the_other():
    out, before = np.zeros(1, "i4"), np.zeros(64, "i4")
    run("atom.global.add.u32 %r1, [%x0], 3; add.s64 %x2, %x1, %at; st.global.u32 [%x2], %r1;", threads=64, out=out,
        before=before)
    assert out == 192 and sorted(before) == list(range(0, 192, 3))


def test_atomics_of_each_kind():
    """Bitwise ones, and sums of bfloat16, of which each is rounded, and of float32, where subnormals are zeros."""
    for kind, text, before, after in (
            ("u4", "xor.b32 [%x0], %lane", 0x55, 0x55), ("u4", "or.b32 [%x0], %lane", 32, 63),
            ("u2", "add.noftz.bf16 [%x0], 0x3f80", 0x3f80, 0x4204), ("u4", "add.f32 [%x0], 0f3F800000", 1, 0x42000000),
            ("u4", "add.f32 [%x0], 0f00000001", 0x80000000, 0)):
        out = np.full(1, before, kind)
        run(f"red.relaxed.gpu.global.{text};", out=out)
        assert out == after, text


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


def test_a_copy_of_a_part_has_zeros_behind_it():
    x, out = aligned(np.arange(1, 33, dtype="u1").repeat(4)), np.zeros(32, "u4")
    text = """mov.u32 %r1, memory; shl.b32 %r2, %lane, 2; add.u32 %r3, %r1, %r2; setp.lt.u32 %p1, %lane, 2;
        shl.b32 %r4, %lane, 4; add.u32 %r4, %r1, %r4; mul.wide.u32 %x2, %lane, 16; add.s64 %x2, %x2, %x0;
        add.s64 %x2, %x2, {}; mul.lo.u32 %r5, %lane, 12; add.u32 %r5, %r5, {};
        @%p1 cp.async.cg.shared.global [%r4], [%x2], 16, %r5; cp.async.wait_all; ld.shared.u32 %r6, [%r3];
        add.s64 %x2, %x1, %at; st.global.u32 [%x2], %r6;"""
    run(text.format(0, 0), shared=128, x=x, out=out)
    np.testing.assert_array_equal(out[:8], [0] * 4 + [n * 0x01010101 for n in (5, 6, 7)] + [0])
    with pytest.raises(EmulationError, match="thread 0: copies 12 of 16 bytes from 0x.*: more than all, or"):
        run(text.format(4, 12), shared=128, x=x, out=out)
    with pytest.raises(EmulationError, match="thread 1: copies 20 of 16 bytes"):
        run(text.format(0, 8), shared=128, x=x, out=out)


def test_two_warps_that_copy_to_one_place_race():
    with pytest.raises(EmulationError, match="copies to byte 0 of shared memory, which warp 1 wrote with no barrier"):
        run("add.s64 %x2, %x0, %at; cp.async.ca.shared.global [memory], [%x2], 4; cp.async.wait_all;", threads=64,
            shared=4, x=np.zeros(64, "f4"))


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


def test_inline_assembler_belongs_to_the_line_that_it_stands_for():
    """From Triton 3.8 on its lines have numbers of their own, which are those of other lines of the Python."""
    out = np.zeros(32, "u4")
    text = """
        .loc 1 7 5      // a.py:7:5
        // begin inline asm
        %smov.u32 %%r1, 1;
        %sadd.u32 %%r1, %%r1, 2;
        // end inline asm
        .loc 1 9 5      // a.py:9:5
        add.s64 %%x2, %%x0, %%at;
        st.global.b32 [%%x2], %%r1;
        """
    numbered = text % (".loc 1 7 5\n", ".loc 1 8 5      // a.py:8:5\n")
    for written in (text % ("", ""), numbered):
        counts = run(written, out=out)
        assert [n for (_, line), n in sorted(counts.instructions.items()) if line in (7, 8, 9)] == [2, 3], written
    assert (out == 3).all()


def test_operations_are_those_of_active_lanes():
    counts = run("""setp.lt.u32 %p1, %lane, 5; mov.b32 %r1, 0f3F800000; fma.rn.f32 %r2, %r1, %r1, %r1;
        @!%p1 bra $end; add.f32 %r2, %r2, %r1; add.f32 %r2, %r2, %r1; $end:""", threads=64, grid=(3,),
                 out=np.zeros(1, "f4"))
    assert counts.flops["cuda"] == 3 * (2 * 64 + 2 * 5) and counts.diverged == 3
    counts = run("setp.lt.u32 %p1, %lane, 5; @%p1 fma.rn.f32 %r1, 0f0, 0f0, 0f0; @!%p1 add.f32 %r1, 0f0, 0f0;",
                 out=np.zeros(1, "f4"))
    assert counts.flops["cuda"] == 2 * 5 + 27 and counts.diverged == 0
