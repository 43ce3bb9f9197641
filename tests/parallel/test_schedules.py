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
      [Step("F", 0), Step("B", 0), Step("F", 1), Step("B", 1)]], None)], ids=str)
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
    assert main(["pipeline", "interleaved", "--ranks", "2", "--micro-batches", "3"]) == 2
    assert "2 ranks must divide the 3 micro-batches" in capsys.readouterr().out


@pytest.mark.parametrize("name, arguments, words", [
    ("gpipe", (0, 1), "got 0 and 1"), ("1f1b", (2, 0), "got 2 and 0"),
    ("interleaved", (2, 3, 2), "2 ranks must divide"), ("interleaved", (2, 2, 0), "chunks is 0")])
def test_what_makes_no_schedule(name, arguments, words):
    with pytest.raises(ValueError, match=words):
        SCHEDULES[name](*arguments)
