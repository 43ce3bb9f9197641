"""DualPipeV's schedule against its paper, and steps in turns: what each hides of the other's messages."""

import signal
import threading
import time
from contextlib import nullcontext

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import backend
from minitorch_dist.__main__ import main
from minitorch_dist.autodiff.primitive import state
from minitorch_dist.comm.state import state as rank
from minitorch_dist.parallel.pipelines import schedule_dual
from minitorch_dist.parallel.pipelines.schedule_dual import dual_pipe_v
from minitorch_dist.parallel.pipelines.schedule_steps import Overlapped, Step, combined, placement_of, v_shaped
from minitorch_dist.parallel.pipelines.schedules import drawn, play, zb_v
from minitorch_dist.parallel.turns import in_turns, pause, taking_turns
from minitorch_dist.testing import ranks
from tests.crews import crews

CASES = "tests.parallel.dual_cases:"


@pytest.mark.parametrize("p", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("more", [0, 1, 5])
def test_bubble_and_memory_are_the_paper_s(p, more):
    """(PP/2 - 1)(F&B + B - 3W) of the rank that waits longest, whatever a combined step takes, and PP + 1 activations,
    PP being 2p. Where nothing is hidden zb-v waits for less, and holds less."""
    m = 2 * p + more
    schedule = dual_pipe_v(p, m)
    assert placement_of(schedule) == v_shaped(p)
    pairs = [sum(len(steps) > 1 for steps in combined(row)) for row in schedule]
    assert max(pairs) == pairs[-1] == 2 * (m - p) - 1
    for f, w in ((1, 1), (3, 1), (4, 3)):
        b = f + w
        for both in (b, b + f / 2, b + f):
            played = play(schedule, f, b, weight=w, both=both)
            idle = [played.end - 2 * m * (f + b) + n * (f + b - both) for n in pairs]
            assert max(idle) == idle[-1] == (p - 1) * (both + b - 3 * w)
            assert played.bubble == pytest.approx(sum(idle) / p / played.end)
        assert played.live == played.held == [2 * p + 1] * p
    other = play(zb_v(p, m))
    assert play(schedule).end - other.end == p - 1 and other.held == [2 * p] * p


@pytest.mark.parametrize("p, m", [(1, 2), (2, 4), (2, 7), (3, 6), (4, 9)])
def test_each_step_is_there_once_and_in_order(p, m):
    for own, row in zip(v_shaped(p), dual_pipe_v(p, m), strict=True):
        for stage in own:
            assert [s.micro_batch for s in row if (s.kind, s.stage) == ("F", stage)] == list(range(m))
            assert [s.micro_batch for s in row if s.kind in "BI" and s.stage == stage] == list(range(m))
            assert [s.micro_batch for s in row if s.kind in "BW" and s.stage == stage] == list(range(m))    # exact mode


def test_the_documented_drawing():
    assert schedule_dual.__doc__.count(drawn(dual_pipe_v(2, 5), both=2).replace("\n", "\n    ")) == 1
    assert "F3&b1&b1 .. f2&B0&B0" in drawn(dual_pipe_v(2, 5))


def test_a_combined_step_waits_for_both_and_its_results_come_at_once():
    first = [Step("F", 0, 0), Overlapped("F", 1, 0), Step("B", 0, 0), Step("B", 1, 0)]
    second = [Step("F", 0, 1), Step("B", 0, 1), Step("F", 1, 1), Step("B", 1, 1)]
    spans = play([first, second], 1, 2, both=2.25).spans
    assert [begin for begin, *_ in spans[0]] == [0, 4, 4.75, 4 + 2.25 + 3]
    assert [begin for begin, *_ in spans[1]] == [1, 2, 6.25, 7.25]


@pytest.mark.parametrize("row, words", [
    ([Overlapped("F", 0, 0)], "F0 of stage 0 together with nothing"),
    ([Overlapped("F", 0, 0), Step("B", 0, 0)], "F0 of stage 0 together with B0 of stage 0: an F"),
    ([Step("F", 0, 0), Overlapped("B", 0, 0)], "B0 of stage 0 together with"),
    ([Overlapped("F", 0, 0), Step("F", 1, 0)], "together with F1 of stage 0")], ids=range(4))
def test_what_can_t_be_combined(row, words):
    with pytest.raises(ValueError, match=words):
        combined(row)


@pytest.mark.parametrize("sizes, words", [((0, 2), "got 0 and 2"), ((2, 3), "3 micro-batches on 2 ranks; .* 4, or")])
def test_what_makes_no_schedule(sizes, words):
    with pytest.raises(ValueError, match=words):
        dual_pipe_v(*sizes)


def test_the_command_shows_what_is_hidden(capsys):
    arguments = ["pipeline", "dualpipev", "--ranks", "2", "--micro-batches", "5"]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert drawn(dual_pipe_v(2, 5)) in said and "takes 3 cells" in said and "at once: 5, 5." in said
    assert main([*arguments, "--both", "2"]) == 0
    said = capsys.readouterr().out
    assert drawn(dual_pipe_v(2, 5), both=2) in said and "takes 2 cells" in said
    assert "for 1 cell, (p-1)" in said        # (2-1)·(2 + 2 - 3)
    assert main(["pipeline", "1f1b", "--both", "2"]) == 2
    assert "--both 2: no steps of 1f1b are combined" in capsys.readouterr().err
    assert main([*arguments, "--both", "1"]) == 2
    assert "--both 1" in capsys.readouterr().err


# ---------------------------------------------------------------- in turns

def test_turns_are_taken_at_pauses_only():
    said = []

    def steps(name, count):
        for i in range(count):
            said.append(f"{name}{i}")
            pause()
        said.append(name)
    for counts, wanted in (((2, 2), "a0 b0 a1 b1 a b"), ((0, 2), "a b0 b1 b"), ((3, 1), "a0 b0 a1 b a2 a")):
        said.clear()
        in_turns(lambda: steps("a", counts[0]), lambda: steps("b", counts[1]))  # noqa: B023
        assert " ".join(said) == wanted and not taking_turns() and rank.turn is None


@pytest.mark.parametrize("culprit", [0, 1])
def test_what_one_raises_ends_the_other(culprit):
    pauses, before = [], threading.active_count()

    def fails():
        pause()
        raise MemoryError("here")

    def goes_on():
        for _ in range(9):
            pauses.append(1)
            pause()
    with pytest.raises(MemoryError, match="here"):
        in_turns(*[(fails, goes_on), (goes_on, fails)][culprit])
    assert len(pauses) < 3 and threading.active_count() == before


def test_ctrl_c_ends_the_one_whose_turn_it_is():
    """It raises in the main thread, whose function waits meanwhile."""
    pauses, before, caught = [], threading.active_count(), threading.Event()

    def waits():
        try:
            pause()
        finally:
            caught.set()

    def goes_on():
        time.sleep(0.1)         # the other one waits by now
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        assert caught.wait(10)
        time.sleep(0.1)         # and has said by now what it has raised
        for _ in range(9):
            pauses.append(1)
            pause()
    with pytest.raises(KeyboardInterrupt):
        in_turns(waits, goes_on)
    assert len(pauses) == 1 and threading.active_count() == before


def test_both_have_the_caller_s_modes_and_random_numbers_and_neither_the_other_s():
    found = []

    def look(context):
        with context:
            pause()
            found.append((state.off, np.geterr()["over"], backend.random_rows((4,)).tolist()))
            pause()
    caller, own = (backend.random_scope(1, step, 4, (0, 4)) for step in (1, 2))
    with mt.no_grad(), caller, np.errstate(over="raise"):
        in_turns(lambda: look(own), lambda: look(nullcontext()))
    for (off, over, numbers), step in zip(found, (2, 1), strict=True):
        with backend.random_scope(1, step, 4, (0, 4)):
            assert off == 0 and over == "raise" and numbers == backend.random_rows((4,)).tolist()


@pytest.mark.parametrize("latency, hidden", [(1.0, 2.0), (4.0, 6.0), (0.0, 0.0)])
def test_what_a_combined_step_hides(latency, hidden):
    """Forward 3 s, a message, 2 s, a message; backward a message, 4 s, a message, 6 s. By hand, from the first one's
    begin, with messages of 1 s that pass one after the other: forward posts at 3 and 6 and goes on at 4 and 10;
    backward posts at 3 and 10 and goes on at 6 and 11: both are through at 17 instead of 19. With 4 s: forward posts at
    3 and 9, goes on at 7 and 15; backward posts at 3 and 15, goes on at 11 and 19: 25 instead of 31."""
    seconds, m = ((3.0, 6.0), (2.0, 4.0)), 5
    pairs = 2 * (m - 1) - 1
    whole = 2 * m * (15 + 4 * latency)
    for apart, wanted in ((True, whole), (False, whole - pairs * hidden)):
        for found, off in crews.call(CASES + "timed", 2, (m, latency, seconds, apart)):
            assert found == pytest.approx(wanted) and off < 1e-12


# ---------------------------------------------------------------- a rank that goes wrong in its turn

PROGRAM = """
import sys, time
from minitorch_dist import comm
from minitorch_dist.parallel.turns import in_turns, pause

world = comm.world()

def errs():
    pause()
    if world.rank == 1:
        {0}

def errs_at_once():
    if world.rank == 1:
        {0}

def waits():
    pause()
    pause()

in_turns({1})
world.barrier()
"""


def goes_wrong(folder, how, functions):
    """The Run of PROGRAM on two ranks."""
    path = folder / "program.py"
    path.write_text(PROGRAM.format(how, functions))
    return ranks.launch([path], 2, limit=20, env={"MINITORCH_STALL_SECONDS": "1"})


@pytest.mark.parametrize("functions", ["errs, waits", "waits, errs"])
def test_an_exit_status_is_the_job_s(tmp_path, functions):
    run = goes_wrong(tmp_path, "sys.exit(3)", functions)
    assert run.returncode == 3 and "in errs" in run.stderr[1] and not run.stderr[0].strip(), run.report()


@pytest.mark.parametrize("functions", ["errs, waits", "waits, errs_at_once"])
def test_the_stall_limit_tells_whose_turn_it_is(tmp_path, functions):
    run = goes_wrong(tmp_path, "time.sleep(60)", functions)
    assert run.returncode == 1 and "time.sleep(60)" in run.stderr[1] and "is in no call" in run.stderr[1], run.report()
