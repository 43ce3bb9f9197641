"""The emulated GPU by itself, on PTX written by hand: what it refuses, branches, matrices, barriers."""

import numpy as np
import pytest

from minitorch_dist.kernels.emulator import EmulationError, Unknown, aligned, machine

from .by_hand import run

RNG = np.random.default_rng(0)


# --- what is refused --------------------------------------------------------------------------------------------------


UNKNOWN = """tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 512
    div.rz.f64 %x1, %x2, %x3
    add.rz.f16 %h1, %h2, %h3
    mad.rz.f32 %r1, %r2, %r3, %r4
    add.cc.u16 %h1, %h2, %h3
    madc.wide.u32 %x1, %r2, %r3, %x4
    add.cc.f32 %r1, %r2, %r3
    mul.cc.lo.u32 %r1, %r2, %r3
    add.sat.s32 %r1, %r2, %r3
    add.f32.f16 %r1, %h1, %r2
    mad.hi.sat.s32 %r1, %r2, %r3, %r4
    fma.rn.relu.f16x2 %r1, %r2, %r3, %r4
    min.xorsign.abs.f32 %r1, %r2, %r3
    min.relu.s32 %r1, %r2, %r3
    min.f32 %r1, %r2, %r3, %r4
    prmt.b32.f4e %r1, %r2, %r3, 1
    sqrt.approx.ftz.f64 %x1, %x2
    setp.lt.s32 %p1|%p2, %r1, %r2
    setp.eq.and.s32 %p2, %r1, %r2, !%p1
    setp.eq.f16x2 %p1, %r1, %r2
    setp.eq.and.bf16x2 %p1|%p2, %r1, %r2, %p3
    vote.sync.any.pred %p2, !%p1, 0xffffffff
    vote.any.pred %p2, %p1
    shfl.bfly.b32 %r1, %lane, 1, 31
    shfl.sync.bfly.b32 %r1, %lane, 1, 31, 0xffff
    mov.u32 %r2, 0xffff; redux.sync.add.s32 %r1, %lane, %r2
    cvt.rn.satfinite.f16.f32 %h1, %r1
    cvt.rn.satfinite.e4m3x2.f32 %h1, %r1, %r2
    cvt.rn.tf32.f32 %r1, %r2
    cvt.rni.bf16.bf16 %h1, %h2
    cvt.sat.u8.s32 %r1, %r2
    ld.shared::cluster.u32 %r1, [memory]
    ld.global.L2::cache_hint.u32 %r1, [%x0], %x1
    st.param.b32 [out], %r1
    ld.param.u64 %x1, [out+4]
    mov.u64 %x1, out
    mov.b128 %x1, {%x2, %x3}
    atom.global.inc.u32 %r1, [%x0], 5
    red.global.add.v2.f32 [%x0], {%r1, %r2}
    ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r1, %r2}, [memory]
    mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f16 {%r1, %r2, %r3, %r4}, {%r1, %r2}, {%r1}, {%r1, %r2}
    wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16 {%r1, %r2, %r3, %r4}, %x1, %x2, %r5, 0, 1, 1, 1, 0, 0
    bar.sync 1, 64
    barrier.sync 0
    barrier.cluster.arrive
    mov.u32 %r1, %smid
    mov.u32 %r1, WARP_SZ
    mov.u32 %r1, memory+16
    mov.f32 %r1, 0.5
    mov.u32 %r1, %other"""


@pytest.mark.parametrize("text", [line.strip() for line in UNKNOWN.splitlines()])
def test_what_it_has_not_learnt_is_refused(text):
    """Not taken for an instruction, a number or a register of a similar name."""
    with pytest.raises(Unknown, match="doesn't know"):
        run(text + ";", shared=16, out=np.zeros(32, "f4"))


def test_it_is_refused_where_it_is_reached():
    """A kernel may hold what few of its lanes need."""
    text = """setp.lt.u32 %p1, %lane, 0; @%p1 bra $far; mov.u32 %r1, 7; bra $on; $far: mov.u32 %r1, %smid; $on:
        st.global.b32 [%x0], %r1;"""
    out = np.zeros(1, "u4")
    run(text, out=out)
    assert out == 7
    with pytest.raises(Unknown, match="doesn't know %smid in"):
        run(text.replace("%lane, 0", "%lane, 1"), out=out)


def test_scopes_have_names_of_their_own():
    """Of registers, many at once too, and of labels: what inline assembler declares, once for each of its places."""
    out = np.zeros(32, "u4")
    once = "{ .reg .b32 %r<3>; mov.u32 %r1, 5; bra.uni skip; mov.u32 %lane, 99; skip: add.u32 %r9, %r9, %r1; }"
    run(f"mov.u32 %r1, 1; mov.u32 %r9, 0; {once} /* again; */ {once} add.u32 %r9, %r9, %r1; add.s64 %x2, %x0, %at;"
        "st.global.u32 [%x2], %r9;", out=out)
    assert (out == 11).all()


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


def test_an_instruction_of_the_whole_warp_waits_for_lanes_from_further_down():
    """Compilers put what few lanes do behind all else. Lanes of the second warp need nothing from there."""
    out = np.zeros(64, "i4")
    run("""mov.u32 %r1, %lane; and.b32 %r2, %lane, 35; setp.eq.u32 %p1, %r2, 3; @%p1 bra $rare;
        $meet: redux.sync.add.s32 %r3, %r1, 0xffffffff; add.s64 %x1, %x0, %at; st.global.u32 [%x1], %r3; bra.uni $end;
        $rare: add.u32 %r1, %r1, 100; bra.uni $meet;
        $end:""", threads=64, out=out)
    assert out.tolist() == 32 * [sum(range(32)) + 8 * 100] + 32 * [sum(range(32, 64))]


def test_comparisons_of_two_numbers_in_a_register():
    """setp's first predicate is that of the lower halves, NaN is unlike itself and -0 like 0."""
    lower = np.array([1, np.nan, -0.0, 2], "f4").repeat(8)
    upper = np.array([3, 1, np.nan, -1], "f4").repeat(8)
    for kind, bits in (("f16x2", lambda x: x.astype("f2").view("u2")),
                       ("bf16x2", lambda x: (x.view("u4") >> 16).astype("u2"))):
        x = np.stack([bits(lower), bits(upper)], 1).view("u4").ravel()
        y = np.stack([bits(np.abs(lower)), bits(np.abs(upper))], 1).view("u4").ravel()
        out = np.zeros(32, "u4")
        run(f"""add.s64 %x3, %x0, %at; ld.global.b32 %r1, [%x3]; add.s64 %x4, %x1, %at; ld.global.b32 %r2, [%x4];
            setp.eq.{kind} %p1|%p2, %r1, %r2; selp.u32 %r3, 1, 0, %p1; selp.u32 %r4, 2, 0, %p2;
            or.b32 %r3, %r3, %r4; add.s64 %x5, %x2, %at; st.global.u32 [%x5], %r3;""", x=x, y=y, out=out)
        assert out[::8].tolist() == [3, 2, 1, 1] and (out.reshape(4, 8) == out[::8, None]).all(), kind


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


def test_votes_and_sums_of_a_warp():
    out = np.zeros((4, 32), "u4")
    for limit, wanted in ((0, (0, 0, 1, 0)), (5, (1, 0, 0, 31)), (32, (1, 1, 1, 0xffffffff))):
        run(f"setp.lt.u32 %p1, %lane, {limit};" + "".join(
            f"vote.sync.{mode}.pred %p2, %p1, -1; selp.u32 %r1, 1, 0, %p2; add.s64 %x2, %x0, %at;"
            f"st.global.u32 [%x2 + {128 * i}], %r1;" for i, mode in enumerate(("any", "all", "uni")))
            + "vote.sync.ballot.b32 %r1, %p1, -1; st.global.u32 [%x2 + 384], %r1;", out=out)
        np.testing.assert_array_equal(out, np.repeat(wanted, 32).reshape(4, 32))
    x, least = RNG.standard_normal(32).astype("f4"), np.zeros(64, "f4")
    x[7] = np.nan
    run("add.s64 %x2, %x0, %at; ld.global.b32 %r1, [%x2]; redux.sync.min.f32 %r2, %r1, -1; add.s64 %x2, %x1, %at;"
        "st.global.b32 [%x2], %r2; redux.sync.min.NaN.f32 %r2, %r1, -1; st.global.b32 [%x2 + 128], %r2;",
        x=x, least=least)
    np.testing.assert_array_equal(least, np.repeat([np.nanmin(x), np.nan], 32).astype("f4"))


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_matrices_of_rows_of_16_bytes(trans):
    """Four 8 × 8 matrices of 16-bit numbers: lane l has columns 2·(l % 4) and the next of row l // 4, or of .trans rows
    of that column. What is stored the same way lies as it was."""
    x, got = aligned(RNG.integers(0, 1 << 16, (4, 8, 8)).astype("u2")), np.zeros((4, 32, 2), "u2")
    back = aligned(np.zeros_like(x))
    registers = "{%r10, %r11, %r12, %r13}"
    row = "mul.wide.u32 %d1, %lane, 16; mul.lo.u32 %r1, %lane, 16; mov.u32 %r2, memory; add.u32 %r1, %r1, %r2;"
    run(f"""{row} add.s64 %d2, %d1, %x0; ld.global.v4.b32 {registers}, [%d2]; st.shared.v4.b32 [%r1], {registers};
        ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {registers}, [%r1]; add.s64 %d2, %at, %x1;
        {" ".join(f"st.global.b32 [%d2 + {128 * i}], %r1{i};" for i in range(4))} add.u32 %r1, %r1, 512;
        stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r1], {registers}; ld.shared.v4.b32 {registers}, [%r1];
        add.s64 %d2, %d1, %x2; st.global.v4.b32 [%d2], {registers};""", shared=1024, x=x, got=got, back=back)
    wanted = x.swapaxes(1, 2) if trans else x
    for lane in range(32):
        np.testing.assert_array_equal(got[:, lane], wanted[:, lane // 4, 2 * (lane % 4):2 * (lane % 4) + 2])
    np.testing.assert_array_equal(back, x)


@pytest.mark.parametrize("kind, k", [("f16", 8), ("f16", 16), ("bf16", 16), ("tf32", 4), ("tf32", 8)])
def test_products_of_a_warp(kind, k):
    """Fragments as PTX ISA's formulas have them, element by element: a group of 4 lanes has a row."""
    each = 1 if kind == "tf32" else 2       # numbers in a register
    a, b, c = (RNG.integers(-8, 8, shape).astype("f4") for shape in ((16, k), (k, 8), (16, 8)))

    def registers(find, count):
        numbers = np.array([[[find(lane // 4, lane % 4, i) for i in range(r * each, (r + 1) * each)]
                             for lane in range(32)] for r in range(count)], "f4")
        return {"tf32": lambda: numbers.view("u4"), "f16": lambda: numbers.astype("f2").view("u4"),
                "bf16": lambda: (numbers.view("u4") >> 16).astype("u2").view("u4")}[kind]()[..., 0]
    if each == 1:
        left = registers(lambda g, t, i: a[g + 8 * (i % 2), t + 4 * (i // 2)], k // 2)
        right = registers(lambda g, t, i: b[t + 4 * i, g], k // 4)
    else:
        left = registers(lambda g, t, i: a[g + 8 * (i // 2 % 2), 2 * t + i % 2 + 8 * (i // 4)], k // 4)
        right = registers(lambda g, t, i: b[2 * t + i % 2 + 8 * (i // 2), g], k // 8)
    if kind == "tf32":
        left = left | 0x1fff        # bits that are not looked at
    added = np.array([[c[lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2] for lane in range(32)]
                      for i in range(4)], "f4")
    given, out = np.concatenate([left, right, added.view("u4")]).astype("u4"), np.zeros((4, 32), "f4")
    names = [f"%r{10 + i}" for i in range(len(given))]
    parts = ["{" + ", ".join(names[first:end]) + "}" for first, end in (
        (0, len(left)), (len(left), len(given) - 4), (len(given) - 4, len(given)))]
    counts = run("add.s64 %x2, %x0, %at; add.s64 %x3, %x1, %at;"
                 + "".join(f"ld.global.b32 {name}, [%x2 + {128 * i}];" for i, name in enumerate(names))
                 + f"mma.sync.aligned.m16n8k{k}.row.col.f32.{kind}.{kind}.f32 {{%r1, %r2, %r3, %r4}}, "
                 + ", ".join(parts) + ";"
                 + "".join(f"st.global.b32 [%x3 + {128 * i}], %r{1 + i};" for i in range(4)), given=given, out=out)
    product = a @ b + c
    for lane in range(32):
        for i in range(4):
            assert out[i, lane] == product[lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2]
    assert counts.flops["tensor"] == 2 * 16 * 8 * k


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


def test_who_writes_what_another_warp_has_read_races():
    """Read by the writer too, or not."""
    for readers in (1, 3):
        with pytest.raises(EmulationError, match="writes byte 0 of shared memory, which .* read with no barrier"):
            run(f"""shr.u32 %r2, %lane, 5; and.b32 %r2, %r2, {readers}; setp.ne.u32 %p1, %r2, 0; shr.u32 %r3, %lane, 5;
                setp.eq.u32 %p2, %r3, 2; @%p1 ld.shared.b32 %r1, [memory]; @%p2 st.shared.b32 [memory], 5;""",
                threads=96, shared=4, out=np.zeros(1, "f4"))


def test_a_grid_of_three_dimensions():
    out = np.zeros((4, 3, 2), "u4")
    run("""mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y; mov.u32 %r3, %ctaid.z; mov.u32 %r4, %nctaid.x;
        mov.u32 %r5, %nctaid.y; mad.lo.u32 %r6, %r3, %r5, %r2; mad.lo.u32 %r6, %r6, %r4, %r1; mul.wide.u32 %x2, %r6, 4;
        add.s64 %x2, %x2, %x0; mad.lo.u32 %r7, %r3, 10, %r2; mad.lo.u32 %r7, %r7, 10, %r1; st.global.u32 [%x2], %r7;""",
        grid=(2, 3, 4), out=out)
    np.testing.assert_array_equal(out, np.arange(4)[:, None, None] * 100 + np.arange(3)[:, None] * 10 + np.arange(2))


def test_threads_that_have_ended_are_not_waited_for():
    out = np.zeros(96, "i4")
    run("""setp.ge.u32 %p1, %lane, 70; @%p1 bra $end; bar.sync 0; setp.lt.u32 %p1, %lane, 9; @%p1 ret; bar.sync 0;
        add.s64 %x2, %x0, %at; st.global.u32 [%x2], %lane; $end:""", threads=96, out=out)
    lanes = np.arange(96)
    np.testing.assert_array_equal(out, np.where((lanes >= 9) & (lanes < 70), lanes, 0))


def test_a_warp_that_waits_at_two_barriers():
    text = "setp.lt.u32 %p1, %lane, {}; @%p1 bra $a; bar.sync 0; bra $end; $a: bar.sync 0; $end:"
    assert run(text.format(32), threads=64, out=np.zeros(1, "f4")).barriers == 1
    with pytest.raises(EmulationError, match="thread 7: waits at a barrier while others of its warp wait at another"):
        run(text.format(7), threads=64, out=np.zeros(1, "f4"))


def test_the_closing_brace_ends_a_kernel():
    """As ret does: nobody waits for those who have come to it."""
    out = np.zeros(64, "u4")
    run("""setp.ge.u32 %p1, %lane, 32; @%p1 bra $others; bar.sync 0; add.s64 %x2, %x0, %at; st.global.u32 [%x2], 7;
        bra $end; $others: mov.u32 %r1, 0; $end: }""", threads=64, out=out)
    np.testing.assert_array_equal(out, np.repeat([7, 0], 32))


def test_a_loop_without_end(monkeypatch):
    monkeypatch.setattr(machine, "MOST", 100)
    with pytest.raises(EmulationError, match="thread 3: still runs after 100 blocks"):
        run("setp.lt.u32 %p1, %lane, 3; $spin: @!%p1 bra $spin;", out=np.zeros(1, "f4"))
    with pytest.raises(EmulationError, match=r"thread 5: reaches a trap \(@%p1 trap\)"):
        run("setp.eq.u32 %p1, %lane, 5; @%p1 trap;", out=np.zeros(1, "f4"))
