"""Ranks that stay for several calls: values, failures, limits, and that nothing is left of them."""

import os
import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
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


def test_a_process_with_many_open_files_has_crews_too(crews):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2000 if hard == resource.RLIM_INFINITY else min(2000, hard), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]      # select.select takes none above these
    try:
        assert [value[0] for value in crews.call(PROGRAMS + "rank_and", 2, args=("x",))] == [0, 1]
    finally:
        for file in held:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.thorough
def test_what_fails_ends_the_crew_and_the_next_call_has_a_new_one(crews):
    for target, args, limit, words in (("fails_on", (1,), 60, "this key"), ("never_comes", (), 3, "its time limit"),
                                       ("leaves_without_a_value", (), 60, "no value from ranks [0, 1, 2]"),
                                       ("leaves_a_hook", (), 60, "leaves to the next call a world with hooks="),
                                       ("leaves_a_message", (), 60, "a message='that nobody received'"),
                                       ("leaves_a_variable", (), 60, "environment={'MINITORCH_COLOUR': 'blue'}"),
                                       ("leaves_a_function", (), 60, "replaced=['os.posix_fallocate']"),
                                       ("leaves_a_thread", (), 60, "threads=['sleeper']"),
                                       ("draws_for_all", (), 60, "leaves to the next call NumPy's random numbers")):
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


def test_a_crew_ends_after_many_calls(crews, monkeypatch):
    monkeypatch.setattr(crew, "CALLS", 2)
    for left in (1, 0, 1):
        crews.call(PROGRAMS + "rank_and", 2)
        assert len(crews.crews) == left


def test_each_call_has_a_world_of_its_own(crews):
    for _ in range(2):
        assert crews.call(PROGRAMS + "breaks_the_world", 2) == [2, 2]
    assert len(crews.crews) == 1


def test_all_crews_end_whatever_is_wrong_with_one(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(AssertionError, match="status 5"), Crews() as crews:
        for target, n in (("rank_and", 3), ("fails_at_the_exit", 1), ("rank_and", 2)):
            crews.call(PROGRAMS + target, n)
        processes = pids(crews)
    assert len(processes) == 6 and all_gone(processes) and list(tmp_path.iterdir()) == []


def test_calls_of_other_threads_wait(crews):
    with ThreadPoolExecutor(4) as pool:
        values = list(pool.map(lambda x: crews.call(PROGRAMS + "rank_and", 2, args=(x,)), range(8)))
    assert [[value[1] for value in found] for found in values] == [[(x,)] * 2 for x in range(8)]
    assert len(crews.crews) == 1


def test_a_call_finds_no_numbers_of_the_one_before_it(crews):
    crews.call(PROGRAMS + "leaves_numbers", 1)
    assert crews.call(PROGRAMS + "finds_numbers", 1) == [0]


def test_a_copy_of_the_process_keeps_no_ranks(crews):
    """One that was forked has the pipes of the orders too."""
    crews.call(PROGRAMS + "rank_and", 2)
    copy = os.fork()
    if copy == 0:
        time.sleep(100)
        os._exit(0)
    try:
        begin = time.monotonic()
        with crews:
            pass
        assert time.monotonic() - begin < crew.END_SECONDS / 2
    finally:
        os.kill(copy, signal.SIGKILL)
        os.waitpid(copy, 0)


@pytest.mark.parametrize("call", [True, False])
def test_ranks_and_their_folder_end_with_the_process_that_started_them(tmp_path, call):
    """After a call, or before they have come to their orders."""
    program = tmp_path / "program.py"
    program.write_text("import os\nfrom minitorch_dist.testing.crew import Crew\none = Crew(2)\n"
                       + f"one.call({PROGRAMS + 'rank_and'!r})\n" * call +
                       "pids = [one.launch.process.pid]\n"
                       + "pids += [(one.folder / f'rank-{r}.pid').read_text().strip() for r in range(2)]\n" * call +
                       "print(*pids, flush=True)\nos._exit(0)\n")
    folder = tmp_path / "temporary"
    folder.mkdir()
    environment = os.environ | {"TMPDIR": str(folder), "PYTHONPATH": os.pathsep.join(
        [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])}
    told = subprocess.run([sys.executable, program], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    assert all_gone([int(text) for text in told.stdout.split()])
    assert not call or not list(folder.glob("crew-*"))
