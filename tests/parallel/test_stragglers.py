"""A rank that is slow is named, by all ranks alike; what is a wait, and what is computing."""

import time

import pytest

from minitorch_dist.comm.communicator import world_of_one
from minitorch_dist.comm.state import RankState
from minitorch_dist.parallel.stragglers import Report, Stragglers, slow
from tests.crews import crews

CASES = "tests.parallel.stragglers_cases:"


def test_slow_is_against_the_median_of_the_others():
    assert slow([1.0, 1.0, 1.0, 1.31]) == {3: 1.31} and slow([1.0, 1.0, 1.0, 1.29]) == {}
    assert slow([2.0, 8.0, 4.0, 3.0]) == {1: 8 / 3, 2: 4 / 3}       # 4 against the median of 2, 3 and 8
    assert slow([1.0, 2.0]) == {1: 2.0} and slow([5.0]) == {}
    assert slow([1.0, 1.0, 3.0], factor=4) == slow([1.0, 2.0], factor=2) == {}
    assert slow([1.0, 0.0]) == {}       # no number of times as long as nothing


def test_slow_ranks_of_five():
    assert slow([3.0, 1.0, 1.0, 2.0, 1.0]) == {0: 3.0, 3: 2.0}


@pytest.mark.parametrize("algorithm", ["auto", "ring"])     # ring: calls within a call
def test_a_slow_rank_is_named(algorithm):
    """It computes as long as it sleeps, and the others wait for what it sleeps longer."""
    everyone = crews.call(CASES + "reports", 4, ([0.02, 0.02, 0.08, 0.02], 10, 5, algorithm))
    found = [reports for reports, _ in everyone]
    assert all(reports == found[0] for reports in found)
    assert [i for i, report in enumerate(found[0]) if report] == [4, 9]
    for report in (found[0][4], found[0][9]):
        assert set(report.slow) == {2} and report.steps == 5
        assert report.computing[2] >= 0.08 and report.waiting[2] < report.waiting[1]
        for rank in (0, 1, 3):
            assert 0.02 <= report.computing[rank] < 0.07 and report.waiting[rank] > 0.02
        assert "rank 2 is slow: it computes " in str(report)
    if algorithm == "auto":     # beside the ten all-reduces: 16 bytes to each other rank, twice
        assert all(sent["all_gather"] == (2, 2 * 3 * 16) for _, sent in everyone)


@pytest.mark.parametrize("seconds, slow_ranks", [([0.03, 0.1, 0.03, 0.1], set()), ([0.03, 0.1, 0.03, 0.3], {3})])
def test_a_pipelines_stages_are_compared_each_for_itself(seconds, slow_ranks):
    """Ranks 0 and 2 are the first, 1 and 3 the second, which takes three times as long."""
    for found, _ in crews.call(CASES + "reports", 4, (seconds, 6, 6, "auto", 2)):
        assert set(found[-1].slow) == slow_ranks


@pytest.mark.parametrize("settings, words", [
    ({"every": 0}, "every is 0; it must be a whole number of steps, 1 or more"), ({"every": 2.5}, "every is 2.5"),
    ({"every": 5, "factor": 0.9}, "factor is 0.9; it must be at least 1"),
    ({"every": 5, "factor": float("inf")}, "factor is inf; it must be at least 1, and finite")], ids=str)
def test_what_would_never_tell_anything_or_always_is_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        Stragglers(world_of_one(), **settings)


def test_as_a_table():
    report = Report(20, [0.0015, 0.02475], [0.03, 0.0], slow([0.0015, 0.02475]))
    assert str(report).splitlines() == [
        "median of 20 steps, ms  computing  waiting",
        "rank 0                       1.50    30.00",
        "rank 1                      24.75     0.00",
        "rank 1 is slow: it computes 16.50 times as long as the median of the others, who wait for it"]


def test_a_wait_within_a_wait_counts_once():
    state = RankState()
    state.enter(None)       # before anybody asks
    state.waited = 0.0
    state.leave()
    assert state.waited == 0.0
    begin = time.perf_counter()
    state.enter(None)
    time.sleep(0.01)
    state.enter(None)
    time.sleep(0.01)
    state.leave()
    state.leave()
    assert 0.02 <= state.waited <= time.perf_counter() - begin
    seen = state.waited
    time.sleep(0.01)
    assert state.waited == seen
