"""Pipeline schedules against the papers' formulas, a drawing by hand, and schedules that can't be done."""

import pytest

from minitorch_dist.__main__ import main
from minitorch_dist.parallel.schedules import (
    SCHEDULES,
    Step,
    chunks_of,
    drawn,
    gpipe,
    interleaved,
    one_forward_one_backward,
    play,
    zb_h1,
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
    assert chunks_of(schedule) == v and played.bubble == pytest.approx((p - 1) / (v * m + p - 1), abs=1e-12)
    assert all(live <= min(v * m, (v - 1) * p + 2 * (p - s) - 1) for s, live in enumerate(played.live))
    assert interleaved(p, m, 1) == one_forward_one_backward(p, m)


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
    first = [Step("F", 0), Step("I", 0), Step("W", 0)]
    assert [b for b, *_ in play([first, first], 1, 5, weight=3).spans[0]] == [0, 4, 6]
    assert [b for b, *_ in play([first, [Step("F", 0), Step("B", 0)]], 1, 5, weight=3).spans[0]] == [0, 7, 9]
    assert play([first, first], 1, 5, weight=3, send=0.5).end == 1 + 0.5 + 1 + 2 + 0.5 + 2 + 3


def test_1f1b_drawn_by_hand():
    """Forward one cell, backward two: Narayanan et al. 2021's figure, for three ranks."""
    assert drawn(one_forward_one_backward(3, 4)).splitlines() == [
        "rank 0  0 1 2 . . . . 0 0 3 1 1 . 2 2 . 3 3",
        "rank 1  . 0 1 . . 0 0 2 1 1 3 2 2 . 3 3 . .",
        "rank 2  . . 0 0 0 1 1 1 2 2 2 3 3 3 . . . ."]


def test_gpipe_drawn_by_hand():
    assert drawn(gpipe(2, 2), 1, 1).splitlines() == ["rank 0  0 1 . . 0 1", "rank 1  . 0 1 0 1 ."]


def test_links_take_time():
    """One micro-batch through two ranks, there and back, over a link of half a unit."""
    assert play(gpipe(2, 1), 1, 2, send=0.5).end == 1 + 0.5 + 1 + 2 + 0.5 + 2
    assert play(interleaved(1, 1, 2), 1, 2, send=0.5).end == 1 + 1 + 2 + 2       # within a rank there is none


@pytest.mark.parametrize("schedule, words", [
    ([[Step("F", 0), Step("B", 0)], [Step("B", 0), Step("F", 0)]], "rank 0 before B0, rank 1 before B0"),
    ([[Step("F", 0), Step("F", 1), Step("B", 1), Step("B", 0)], [Step("F", 0), Step("B", 0)]], "rank 1 .* B1, F1"),
    ([[Step("F", 0), Step("B", 0), Step("B", 0)]], "rank 0 .* B0"),
    ([[Step("F", 0)]], "rank 0 .* B0"),
    ([[Step("F", 1), Step("F", 0), Step("B", 0), Step("B", 1)],
      [Step("F", 0), Step("B", 0), Step("F", 1), Step("B", 1)]], None),
    ([[Step("F", 0), Step("W", 0), Step("I", 0)]], "rank 0 before W0"),
    ([zb_h1(2, 3)[0], zb_h1(2, 3)[1][:-1]], "rank 1 .*: W2"),
    ([[Step("F", 0), Step("W", 0), Step("B", 0)]], "rank 0 .* B0, I0"),
    ([[Step("F", 0), Step("I", 0), Step("W", 0), Step("W", 0)]], "rank 0 .* W0"),
    ([[Step("F", 0), Step("I", 0), Step("B", 0), Step("W", 0)]], "rank 0 .* B0"),
    ([[Step("F", 0), Step("F", 2), Step("B", 2), Step("B", 0)]], r"are 0, 1, …; this one has \[0, 2\]"),
    ([[]], "this one has none"), ([[Step("F", -1), Step("B", -1)]], r"this one has \[-1\]"),
    ([[Step("F", 0), Step("X", 0)]], "kinds F, B, I, W; this one has X"),
    ([[Step("F", 0), Step("I", 0), Step("F", 1), Step("B", 1), Step("W", 0)]], None)], ids=str)
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
    assert main(["pipeline", "interleaved", "--ranks", "2", "--micro-batches", "3"]) == 2
    assert "2 ranks must divide the 3 micro-batches" in capsys.readouterr().out


@pytest.mark.parametrize("name, arguments, words", [
    ("gpipe", (0, 1), "got 0 and 1"), ("1f1b", (2, 0), "got 2 and 0"), ("zb-h1", (0, 2), "got 0 and 2"),
    ("interleaved", (2, 3, 2), "2 ranks must divide"), ("interleaved", (2, 2, 0), "chunks is 0")])
def test_what_makes_no_schedule(name, arguments, words):
    with pytest.raises(ValueError, match=words):
        SCHEDULES[name](*arguments)
