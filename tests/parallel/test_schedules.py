"""Pipeline schedules against the papers' formulas, a drawing by hand, and schedules that can't be done."""

import pytest

from minitorch_dist.__main__ import main
from minitorch_dist.parallel.pipelines import schedules
from minitorch_dist.parallel.pipelines.schedule_steps import Step, looping, placement_of, v_shaped
from minitorch_dist.parallel.pipelines.schedules import (
    SCHEDULES,
    SLICED,
    drawn,
    gpipe,
    interleaved,
    label,
    one_forward_one_backward,
    play,
    schedule_of,
    zb_h1,
    zb_h2,
    zb_v,
)


@pytest.mark.parametrize("p", range(1, 7))
@pytest.mark.parametrize("m", range(1, 13))
def test_bubbles_and_live_micro_batches_are_the_papers(p, m):
    for times in ((1, 1), (1, 2), (3, 5)):
        for schedule, live in ((gpipe(p, m), [m] * p),
                               (one_forward_one_backward(p, m), [min(m, p - s) for s in range(p)])):
            played = play(schedule, *times)
            assert played.bubble == pytest.approx((p - 1) / (m + p - 1), abs=1e-12) and played.live == live
            assert played.end == pytest.approx((m + p - 1) * sum(times))


@pytest.mark.parametrize("p, m, v", [(1, 3, 2), (2, 4, 2), (2, 4, 3), (3, 6, 2), (4, 8, 2), (4, 8, 3), (4, 4, 2)])
def test_more_chunks_make_the_bubble_smaller(p, m, v):
    schedule = interleaved(p, m, v)
    played = play(schedule)
    assert placement_of(schedule) == looping(p, v)
    assert played.bubble == pytest.approx((p - 1) / (v * m + p - 1), abs=1e-12)
    assert all(live <= min(v * m, (v - 1) * p + 2 * (p - s) - 1) for s, live in enumerate(played.live))
    assert interleaved(p, m, 1) == one_forward_one_backward(p, m)


@pytest.mark.parametrize("p", range(1, 6))
@pytest.mark.parametrize("m, s", [(1, 2), (1, 7), (2, 3), (3, 2), (4, 4), (5, 3)])
def test_slices_of_sequences_wait_as_so_many_micro_batches(p, m, s):
    """Sun et al. 2024, "Seq1F1B": (p-1)/(m·s+p-1), with s - 1 slices more than 1F1B's micro-batches; TeraPipe's all."""
    for times in ((1, 1), (1, 2), (3, 5)):
        for schedule, live in ((gpipe(p, m, s), [m * s] * p),
                               (one_forward_one_backward(p, m, s), [min(m * s, p - r + s - 1) for r in range(p)])):
            played = play(schedule, *times)
            assert played.bubble == pytest.approx((p - 1) / (m * s + p - 1), abs=1e-12) and played.live == live
    for v in (2, 3):
        if m * s % p == 0:
            played = play(interleaved(p, m, v, s))
            assert played.bubble == pytest.approx((p - 1) / (v * m * s + p - 1), abs=1e-12)
    for make, ahead in ((zb_h1, p - 1), (zb_h2, 2 * (p - 1))):
        for f, i, w in ((1, 1, 1), (3, 2, 2)):
            played, whole = (play(schedule, f, i + w, weight=w) for schedule in (make(p, m, s), make(p, m * s)))
            assert played.end == whole.end or (m - 1) * s < ahead and played.end > whole.end
        assert max(played.held) <= max(whole.held) + s - 1


@pytest.mark.parametrize("name", SLICED)
@pytest.mark.parametrize("p, m, s", [(1, 2, 3), (2, 2, 3), (3, 2, 3), (4, 3, 4), (3, 1, 6)])
def test_slices_go_there_in_order_and_come_back_from_the_last(name, p, m, s):
    for row in schedule_of(name, p, m, 2, s):
        for stage in {step.stage for step in row}:
            for kind in "FBIW":
                found = [step[1::2] for step in row if step.stage == stage and step.kind == kind]
                wanted = [(k, j) for k in range(m) for j in (range(s) if kind == "F" else reversed(range(s)))]
                assert found in ([], wanted) and (found or kind != "F")


@pytest.mark.parametrize("p", range(1, 7))
@pytest.mark.parametrize("m", range(1, 13))
def test_zb_h1_s_bubble_is_the_paper_s(p, m):
    """Qi et al. 2023, table 1: (p-1)(T_F + T_B - T_W), where 1F1B has (p-1)(T_F + T_B + T_W) and 1F1B's memory."""
    one = one_forward_one_backward(p, m)
    for f, i, w in ((1, 1, 1), (2, 3, 1), (3, 2, 2), (1, 1, 2), (5, 3, 4)):
        played, whole = play(zb_h1(p, m), f, i + w, weight=w), play(one, f, i + w)
        idle, idle_whole = (x.end - m * (f + i + w) for x in (played, whole))
        assert idle_whole == (p - 1) * (f + i + w)
        if w <= i and m >= p:
            assert idle == (p - 1) * (f + i - w)
        assert idle == (p - 1) * (f + max(0, i - w)) + max(0, p - m) * min(i, w)
        assert played.bubble == pytest.approx(idle / played.end, abs=1e-12)
        assert played.live == whole.live == [min(m, p - s) for s in range(p)]
        assert played.waiting == [min(m, s + 1) for s in range(p)] and played.held == [min(m, p)] * p
        assert whole.waiting == [0] * p and whole.held == whole.live


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("more", [0, 1, 8])
def test_zb_h2_and_zb_v_leave_no_bubble(p, more):
    """Qi et al. 2023, table 1 and ZB-V: with F = I = W a rank is at work from its first step to its last. ZB-H2
    holds (2p-2r-1) micro-batches and as much of W as makes 2p-1; ZB-V p of them, two halves each, as 1F1B does."""
    m = 2 * p - 1 + more
    one, h1, h2, v = (play(s(p, m), 1, 2) for s in (one_forward_one_backward, zb_h1, zb_h2, zb_v))
    assert h2.period == 3 * m and v.period == 6 * m and h2.steady_bubble == v.steady_bubble == 0
    assert (h1.period - 3 * m) * 3 == one.period - 3 * m == 3 * (p - 1)
    assert h2.live == [2 * p - 2 * r - 1 for r in range(p)] and h2.waiting == [2 * r + 1 for r in range(p)]
    assert h2.held == [2 * p - 1] * p and h1.held == [p] * p and one.held[0] == p
    assert v.live == v.held == [2 * p] * p
    for made, times in ((h2, 3), (v, 6)):      # one after the other begins and ends
        assert [row[0][0] for row in made.spans] == list(range(p))
        assert [row[-1][1] for row in made.spans] == [times * m + r for r in range(p)] and made.end == times * m + p - 1
        assert made.bubble == pytest.approx((p - 1) / made.end)


@pytest.mark.parametrize("p", [1, 2, 3, 5])
@pytest.mark.parametrize("m", [1, 2, 4, 7, 12])
def test_zb_h2_at_other_times_and_few_micro_batches(p, m):
    """Table 1's (p-1)(T_F + T_I - 2 T_W); with few micro-batches no more than ZB-H1 waits."""
    for f, i, w in ((1, 1, 1), (2, 2, 1), (3, 3, 2), (5, 4, 3)):
        played, h1, v = (play(s(p, m), f, i + w, weight=w) for s in (zb_h2, zb_h1, zb_v))
        if m >= 2 * p - 1:
            assert played.period - m * (f + i + w) == (p - 1) * (f + i - 2 * w)
        assert played.period <= h1.period and played.live == [min(m, 2 * (p - r) - 1) for r in range(p)]
        assert played.waiting == [min(m, 2 * r + 1) for r in range(p)] and max(played.held) <= min(m, 2 * p - 1)
        assert max(v.held) <= min(2 * m, 2 * p) and placement_of(zb_v(p, m)) == v_shaped(p)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("p, m", [(2, 4), (3, 6), (4, 8)])
def test_batches_follow_at_a_period(name, p, m):
    """Three batches one behind the other, on ranks that don't wait for each other between them."""
    schedule = SCHEDULES[name](p, m, *([2] if name == "interleaved" else []))
    batches = [[step._replace(micro_batch=step.micro_batch + n * m) for n in range(3) for step in row]
               for row in schedule]
    one = play(schedule)
    assert play(batches).end == one.end + 2 * one.period


def test_placements():
    assert looping(3, 2) == [[0, 3], [1, 4], [2, 5]] and looping(2) == [[0], [1]]
    assert v_shaped(3) == [[0, 5], [1, 4], [2, 3]]
    for p, m in ((1, 2), (3, 6)):
        assert [placement_of(SCHEDULES[name](p, m)) for name in ("gpipe", "1f1b", "zb-h1", "zb-h2")] == [looping(p)] * 4
    assert label(Step("I", 3, 5), [1, 5, 7]) == "i3" and label(Step("I", 3, 7), [1, 5, 7]) == "i3'"


def test_within_a_rank_nothing_is_sent():
    """A link of half a unit, of which a V of p ranks has 2(p-1) there and as many back; and one rank none."""
    for p in (1, 2, 4):
        bare = play(zb_v(p, 1)).end
        assert play(zb_v(p, 1), send=0.5).end == bare + 0.5 * 4 * (p - 1)


def test_slices_drawn_by_hand():
    assert drawn(one_forward_one_backward(2, 2, slices=3)).splitlines() == [
        "rank 0  0.0 0.1 0.2 1.0 ... ... 0.2 0.2 1.1 0.1 0.1 1.2 0.0 0.0 ... 1.2 1.2 1.1 1.1 1.0 1.0",
        "rank 1  ... 0.0 0.1 0.2 0.2 0.2 1.0 0.1 0.1 1.1 0.0 0.0 1.2 1.2 1.2 1.1 1.1 1.0 1.0 ... ..."]
    assert drawn(zb_h1(2, 1, slices=2)).splitlines() == [
        "rank 0  F0.0 F0.1 .... .... I0.1 W0.1 I0.0 W0.0", "rank 1  .... F0.0 F0.1 I0.1 I0.0 W0.1 W0.0 ...."]
    assert label(Step("I", 3, 5, 2), [1, 5, 7], 4) == "i3.2" and str(Step("B", 1, 0, 2)) == "B1.2 of stage 0"


def test_zb_v_drawn_by_hand():
    """Three ranks: small letters are on the way back."""
    assert drawn(zb_v(3, 5)).splitlines() == [
        "rank 0  F0 F1 F2 F3 F4 f0 i0 w0 f1 i1 w1 f2 i2 w2 I0 W0 f3 i3 w3 I1 W1 f4 i4 I2 w4 I3 W2 I4 W3 W4 .. ..",
        "rank 1  .. F0 F1 F2 f0 F3 f1 i0 w0 f2 i1 w1 F4 I0 W0 f3 i2 w2 I1 W1 f4 i3 I2 i4 I3 w3 I4 W2 w4 W3 W4 ..",
        "rank 2  .. .. F0 f0 F1 f1 F2 f2 i0 w0 F3 I0 W0 f3 i1 w1 F4 I1 W1 f4 i2 I2 i3 I3 i4 I4 w2 W2 w3 W3 w4 W4"]


def test_zb_h2_drawn_by_hand():
    assert drawn(zb_h2(3, 5)).splitlines() == [
        "rank 0  F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 .. ..",
        "rank 1  .. F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4 ..",
        "rank 2  .. .. F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4"]


def test_zb_h1_drawn_by_hand():
    """Four ranks as in the paper's figure: rank r leaves r of its Ws for later."""
    assert drawn(zb_h1(4, 5)).splitlines() == [
        "rank 0  F0 F1 F2 F3 .. .. .. I0 W0 F4 I1 W1 I2 W2 I3 W3 I4 W4",
        "rank 1  .. F0 F1 F2 .. .. I0 F3 I1 W0 F4 I2 W1 I3 W2 I4 W3 W4",
        "rank 2  .. .. F0 F1 .. I0 F2 I1 F3 I2 W0 F4 I3 W1 I4 W2 W3 W4",
        "rank 3  .. .. .. F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 W2 W3 W4"]
    assert drawn(zb_h1(1, 11)).startswith("rank 0   F0  I0  W0") and drawn(zb_h1(1, 11)).endswith(" F10 I10 W10")


def test_the_next_stage_waits_for_i_alone():
    """Two ranks, the second of which does W at once: the first goes on meanwhile; and after B it can't."""
    first, second = ([Step("F", 0, s), Step("I", 0, s), Step("W", 0, s)] for s in (0, 1))
    assert [b for b, *_ in play([first, second], 1, 5, weight=3).spans[0]] == [0, 4, 6]
    assert [b for b, *_ in play([first, [Step("F", 0, 1), Step("B", 0, 1)]], 1, 5, weight=3).spans[0]] == [0, 7, 9]
    assert play([first, second], 1, 5, weight=3, send=0.5).end == 1 + 0.5 + 1 + 2 + 0.5 + 2 + 3


def test_1f1b_drawn_by_hand():
    """Forward one cell, backward two: Narayanan et al. 2021's figure, for three ranks."""
    assert drawn(one_forward_one_backward(3, 4)).splitlines() == [
        "rank 0  0 1 2 . . . . 0 0 3 1 1 . 2 2 . 3 3",
        "rank 1  . 0 1 . . 0 0 2 1 1 3 2 2 . 3 3 . .",
        "rank 2  . . 0 0 0 1 1 1 2 2 2 3 3 3 . . . ."]


def test_the_documented_drawing():
    assert drawn(one_forward_one_backward(3, 5)).splitlines()[0] + "       a digit" in schedules.__doc__


def test_gpipe_drawn_by_hand():
    assert drawn(gpipe(2, 2), 1, 1).splitlines() == ["rank 0  0 1 . . 0 1", "rank 1  . 0 1 0 1 ."]


def test_links_take_time():
    """One micro-batch through two ranks, there and back, over a link of half a unit."""
    assert play(gpipe(2, 1), 1, 2, send=0.5).end == 1 + 0.5 + 1 + 2 + 0.5 + 2
    assert play(interleaved(1, 1, 2), 1, 2, send=0.5).end == 1 + 1 + 2 + 2       # within a rank there is none


def rows(*texts):
    """A schedule of one's own, "F0 B0" of one stage per rank, "F0.1" of a slice."""
    return [[Step(step[0], int(step[1:].split(".")[0]), rank, int((step.split(".") + ["0"])[1]))
             for step in text.split()] for rank, text in enumerate(texts)]


@pytest.mark.parametrize("schedule, words", [
    (rows("F0 B0", "B0 F0"), "rank 0 before B0 of stage 0, rank 1 before B0 of stage 1"),
    (rows("F0 F1 B1 B0", "F0 B0"), "rank 1 .* B1 of stage 1, F1"),
    (rows("F0 B0 B0"), "rank 0 .*: B0 of stage 0, B0 of stage 0$"),
    (rows("F0"), "rank 0 .* B0"),
    (rows("F1 F0 B0 B1", "F0 B0 F1 B1"), None),
    (rows("F0 W0 I0"), "rank 0 before W0"),
    ([zb_h1(2, 3)[0], zb_h1(2, 3)[1][:-1]], "rank 1 .*: W2"),
    (rows("F0 W0 B0"), "rank 0 .* B0 of stage 0, I0"),
    (rows("F0 I0 W0 W0"), "rank 0 .* W0"),
    (rows("F0 I0 B0 W0"), "rank 0 .* B0"),
    (rows("F0 F2 B2 B0"), r"are 0, 1, …; this one has \[0, 2\]"),
    (rows("F0.0 F0.1 B0.1 B0.0", "F0.0 F0.1 B0.1 B0.0"), None),
    (rows("F0.1 F0.0 B0.1 B0.0"), "rank 0 before F0.1 of stage 0"),
    (rows("F0.0 F0.1 B0.0 B0.1"), "rank 0 before B0 of stage 0"),
    (rows("F0.0 F0.1 I0.1 I0.0 W0.0 W0.1"), "rank 0 before W0 of stage 0"),
    (rows("F0.0 F0.2 B0.2 B0.0"), r"slices are 0, 1, …; this one has \[0, 2\]"),
    (rows("F0.0 F0.1 B0.1 B0.0", "F0.0 B0.0"), "rank 1 .*: B0.1 of stage 1, F0.1 of stage 1"),
    ([], r"one at least per rank .* has \[\]"), ([[]], r"has \[\[\]\]"),
    ([rows("F0 B0")[0], []], r"has \[\[0\], \[\]\]"),
    (rows("F-1 B-1"), r"this one has \[-1\]"),
    (rows("F0 X0"), "kinds F, B, I, W; this one has X"),
    (rows("F0 I0 F1 B1 W0"), None),
    ([rows("F0 B0")[0]] * 2, r"each on one rank; by rank this one has \[\[0\], \[0\]\]"),
    ([[Step("F", 0, 1), Step("B", 0, 1)]], r"stages are 0, 1, …, .* \[\[1\]\]"),
    ([zb_v(2, 3)[0], [s for s in zb_v(2, 3)[1] if s.stage == 1]], r"\[\[0, 3\], \[1\]\]")], ids=str)
def test_schedules_of_one_s_own(schedule, words):
    if words is None:
        assert play(schedule).end > 0
    else:
        with pytest.raises(ValueError, match=words):
            play(schedule)


def test_the_command_draws(capsys):
    assert main(["pipeline", "1f1b", "--ranks", "3", "--micro-batches", "4"]) == 0
    said = capsys.readouterr().out
    assert drawn(one_forward_one_backward(3, 4)) in said and "33.3 %" in said and "at once: 3, 2, 1." in said
    assert main(["pipeline", "zb-h1", "--ranks", "3", "--micro-batches", "4"]) == 0
    said = capsys.readouterr().out
    assert drawn(zb_h1(3, 4)) in said and "14.3 %" in said and "at once: 3, 2, 1." in said
    assert "still to come: 1, 2, 3; together with those above at most 3, 3, 3 at once" in said
    assert main(["pipeline", "zb-v", "--ranks", "3", "--micro-batches", "5"]) == 0
    said = capsys.readouterr().out
    assert drawn(zb_v(3, 5)) in said and "0, 5; 1, 4; 2, 3." in said
    assert "6.2 % of" in said and "batch: for 0.0 %" in said
    assert main(["pipeline", "1f1b", "--ranks", "3", "--micro-batches", "2", "--slices", "4"]) == 0
    said = capsys.readouterr().out
    assert drawn(one_forward_one_backward(3, 2, 4)) in said and "20.0 %" in said and "Slices whose" in said
    assert " 0.1 " in said and "0.1 is slice 1 of micro-batch 0; a micro-batch, whole, would take 4 times" in said
    assert "at once: 6, 5, 4." in said
    for more, words in (
            (["interleaved"], "2 ranks must divide the 3 micro-batches\n"),
            (["interleaved", "--slices", "5"], "micro-batches, or their 15 slices\n"),
            (["zb-v", "--slices", "2"], "has no slices, and 2 are wanted: leave them out, or take one of gpipe"),
            (["1f1b", "--slices", "0"], "one slice or more; got 0"),
            (["1f1b", "--slices", "9999"], "29,997 slices: ranks · stages · (ranks + slices) is 59,998")):
        assert main(["pipeline", *more, "--ranks", "2", "--micro-batches", "3"]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize("name, arguments, words", [
    ("gpipe", (0, 1), "got 0 and 1"), ("1f1b", (2, 0), "got 2 and 0"), ("zb-h1", (0, 2), "got 0 and 2"),
    ("zb-h2", (0, 2), "got 0 and 2"), ("zb-v", (3, 0), "got 3 and 0"),
    ("interleaved", (2, 3, 2), "2 ranks must divide"), ("interleaved", (2, 2, 0), "chunks is 0")])
def test_what_makes_no_schedule(name, arguments, words):
    with pytest.raises(ValueError, match=words):
        SCHEDULES[name](*arguments)


def test_an_unknown_schedule_is_told():
    with pytest.raises(ValueError, match="schedule '1f1b2' is unknown: take one of gpipe, 1f1b"):
        schedules.schedule_of("1f1b2", 4, 8)
