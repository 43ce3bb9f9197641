"""Ranks that stay for several calls: values, failures, limits, and that nothing is left of them."""

import os
import time
from pathlib import Path

import pytest

from minitorch_dist.testing import crew, ranks
from minitorch_dist.testing.crew import Crews

PROGRAMS = "tests.testing.programs:"


@pytest.fixture
def crews(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Crews() as found:
        yield found
    assert list(tmp_path.iterdir()) == []


def pids(found):
    return [int(text) for one in found.crews.values() for text in
            (Path(one.folder, f"rank-{rank}.pid").read_text() for rank in range(one.n))]


def all_gone(processes):
    """Whether they end within 20 s."""
    end = time.monotonic() + 20
    while (left := any(map(ranks.is_alive, processes))) and time.monotonic() < end:
        time.sleep(0.05)
    return not left


def test_calls_one_after_the_other_by_the_same_processes(crews, monkeypatch):
    for n in (2, 1, 2):
        for argument in "xy":
            values = crews.call(PROGRAMS + "rank_and", n, args=(argument,))
            assert [value[:2] for value in values] == [(rank, (argument,)) for rank in range(n)]
    first = pids(crews)
    assert len(first) == 3
    assert crews.call(PROGRAMS + "draws", 2) == crews.call(PROGRAMS + "draws", 2), "seeded anew"
    assert pids(crews)[-2:] == first[-2:], "still the same"
    crews.call(PROGRAMS + "rank_and", 2, env={"COLOUR": "green"})
    monkeypatch.setenv("COLOUR", "red")
    crews.call(PROGRAMS + "rank_and", 2)
    assert len(crews.crews) == 4 and len(set(pids(crews))) == 7, "other settings, other ranks"
    with crews:
        pass
    assert not crews.crews and all_gone(first)


def test_what_fails_ends_the_crew_and_the_next_call_has_a_new_one(crews):
    for target, args, limit, words in (("fails_on", (1,), 60, "this key"), ("never_comes", (), 3, "its time limit"),
                                       ("leaves_without_a_value", (), 60, "no value from ranks [0, 1, 2]"),
                                       ("leaves_a_hook", (), 60, "leaves to the next call a world with hooks=")):
        crews.call(PROGRAMS + "rank_and", 3)
        before = pids(crews)
        with pytest.raises(AssertionError) as caught:
            crews.call(PROGRAMS + target, 3, args, limit=limit)
        assert words in str(caught.value), str(caught.value)
        assert not crews.crews and all_gone(before)
    assert len(crews.call(PROGRAMS + "rank_and", 3)) == 3


def test_a_rank_that_fails_at_its_end_is_told(tmp_path):
    with pytest.raises(AssertionError, match="status 5"), Crews() as crews:
        crews.call(PROGRAMS + "fails_at_the_exit", 1)


def test_the_longest_idle_go_first(crews, monkeypatch):
    monkeypatch.setattr(crew, "IDLE_RANKS", 4)
    for n in (1, 3, 1, 2):
        crews.call(PROGRAMS + "rank_and", n)
    assert [one.n for one in crews.crews.values()] == [1, 2]


def test_ranks_end_with_the_process_that_started_them(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import os\nfrom minitorch_dist.testing.crew import Crews\ncrews = Crews()\n"
                       f"crews.call({PROGRAMS + 'rank_and'!r}, 2)\n"
                       "[one] = crews.crews.values()\n"
                       "pids = [(one.folder / f'rank-{rank}.pid').read_text().strip() for rank in range(2)]\n"
                       "print(*pids, flush=True)\n"
                       "os._exit(0)\n")
    run = ranks.launch([program], 1, env={"PYTHONPATH": os.pathsep.join(
        [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]), "TMPDIR": str(tmp_path)}).check()
    assert all_gone([int(text) for text in run.stdout[0].split()])
