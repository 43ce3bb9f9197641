"""What comes after a failure and what it has cost; the file of steps that says so; which faults are read."""

import os

import pytest

from minitorch_dist import attempt, faults, nn
from minitorch_dist.checkpoints import Checkpoints
from minitorch_dist.supervise import Attempt, Rule, goodput, next_start
from minitorch_dist.supervise.attempts import End, Start, without_progress


def failed(last, first=0, ranks=4, status=9):
    """An attempt that has failed after step `last`; None: before it had begun."""
    return Attempt(ranks, status, *(() if last is None else (first, [1.0] * (last - first))))


# ---------------------------------------------------------------- decisions

def test_ranks_are_taken_in_order():
    rule = Rule((4, 2, 1), max_restarts=9, shrink_after=2)
    attempts = []
    for expected in (4, 4, 2, 2, 1, 1, 1):
        assert next_start(attempts, rule).ranks == expected
        attempts.append(failed(10 * len(attempts) + 10, ranks=expected))
    assert next_start(attempts[:1], rule._replace(shrink_after=1)).ranks == 2
    assert next_start(attempts[:2], rule._replace(ranks=(4,))).ranks == 4


def test_more_ranks_are_tried_again():
    """After a failure on fewer that got further. The tries in the third start and the fifth are in vain."""
    rule = Rule((4, 2, 1), max_restarts=1, shrink_after=1, grow=True)
    story = [(4, 10), (2, 20), (4, None), (2, 30), (4, 30), (2, 40), (4, 50), (2, 50)]
    attempts = []
    for ranks_, last in story:
        assert next_start(attempts, rule).ranks == ranks_, attempts
        attempts.append(failed(last, ranks=ranks_))
    assert isinstance(next_start(attempts, rule), End)      # on 2 as on 4 no step further: the one is a failure
    assert next_start(attempts, rule._replace(max_restarts=2)).ranks == 1
    assert next_start(attempts[:2], rule._replace(grow=False)).ranks == 1
    assert [without_progress(attempts[:i + 1]) for i in range(8)] == [1, 1, 1, 1, 1, 1, 1, 2]
    assert without_progress([failed(10), failed(20, ranks=2), failed(20), failed(20, ranks=2)]) == 2


def test_one_number_of_ranks_at_a_time_is_tried():
    """Of 1 they go to 2; when these fail, back to 1 and not on to 4."""
    rule = Rule((4, 2, 1), grow=True)
    attempts = [failed(1), failed(1, ranks=2), failed(5, ranks=1)]
    assert next_start(attempts, rule).ranks == 2
    assert next_start([*attempts, failed(4, ranks=2)], rule).ranks == 1
    assert next_start([*attempts, failed(6, ranks=2)], rule).ranks == 4


def test_the_count_begins_anew_when_the_job_gets_further():
    rule = Rule((4,), max_restarts=2, backoff=0.5)
    lasts = [30, 30, 25, 31, 31, 40]
    assert [without_progress([failed(last) for last in lasts[:i + 1]]) for i in range(6)] == [1, 2, 3, 1, 2, 1]
    assert [without_progress([failed(None)] * n) for n in (1, 2)] == [1, 2]      # no run had begun
    assert without_progress([failed(None), failed(0)]) == 1
    pauses = [next_start([failed(last) for last in lasts[:i + 1]], rule) for i in range(6)]
    assert pauses[:2] == [Start(4, 0.5), Start(4, 1.0)] and pauses[3:] == [Start(4, 0.5), Start(4, 1.0), Start(4, 0.5)]
    assert isinstance(pauses[2], End)
    assert next_start([failed(1)] * 12, Rule((4,), max_restarts=99)).pause == 60
    many = [failed(1)] * 1100       # more than a float has powers of two
    assert [next_start(many, Rule((4,), max_restarts=10**6, backoff=each)).pause for each in (0, 1e-9)] == [0, 60]


def test_a_crash_loop_names_its_step():
    rule = Rule((4,), max_restarts=1)
    assert next_start([failed(29), failed(29, 20)], rule) == End(
        "a crash loop: 2 failures and no step further, in step 30 (--max-restarts 1); the last words:", True)
    assert next_start([failed(9), failed(29), failed(29)], rule).why.startswith("a crash loop: 2 failures and no step "
                                                                                "further, in step 30 (")
    assert "before a step was noted (" in next_start([failed(None), failed(None)], rule).why
    assert "in step 1,200 and in step 7 (" in next_start([failed(1199), failed(6)], rule).why
    assert isinstance(next_start([failed(3)], Rule((4,), max_restarts=0)), End)


@pytest.mark.parametrize("status, again", [(0, False), (1, True), (2, False), (3, True), (9, True), (130, False),
                                           (137, True), (143, False)])
def test_which_ends_are_wanted(status, again):
    then = next_start([failed(3, status=status)], Rule((4,)))
    assert isinstance(then, Start if again else End) and (again or not then.tells)


def test_goodput_counts_each_step_once():
    """30 steps of 1 s, of which 20 were saved; 29 more of 0.5 s, of which 20; then the rest, of 0.25 s."""
    attempts = [Attempt(4, 9, 0, [1.0] * 30), Attempt(4, 9, 20, [0.5] * 29), Attempt(2, 0, 40, [0.25] * 20)]
    assert goodput(attempts) == (20 * 1.0 + 20 * 0.5 + 20 * 0.25, 10 + 9, 10 * 1.0 + 9 * 0.5)
    attempts[2].status = 143        # interrupted: it was saved
    assert goodput(attempts)[:2] == (35.0, 19)
    attempts[2].status = 1          # what it was to save is not known
    assert goodput(attempts)[:2] == (30.0, 39)
    attempts[2].saved = 52
    assert goodput(attempts)[:2] == (33.0, 27) and not attempts[2].ends_saved
    attempts[2].saved = 60
    assert goodput(attempts)[:2] == (35.0, 19) and attempts[2].ends_saved
    attempts[2].saved = None
    assert goodput([*attempts, Attempt(2, 1)])[:2] == (30.0, 39)        # which didn't come to its first step
    assert goodput([Attempt(1, 0)]) == goodput([Attempt(1, 1)]) == goodput([]) == (0, 0, 0.0)
    assert not Attempt(1, 1).ends_saved
    anew = [Attempt(1, 9, 0, [1.0] * 5), Attempt(1, 0, 0, [1.0] * 7)]   # nothing was saved
    assert goodput(anew) == (7.0, 5, 5.0)


# ---------------------------------------------------------------- the file of steps

def test_steps_are_noted(tmp_path, monkeypatch):
    path = tmp_path / "steps"
    assert attempt.read_steps(path) == (None, [], None, False)
    monkeypatch.setenv(attempt.SUPERVISED, str(path))
    log = attempt.StepLog(20)
    assert attempt.read_steps(path) == (20, [], None, True)
    log.done(0.25)
    log.saved(21)
    log.done(1.5)
    with path.open("a") as file:
        file.write("0.1")       # a line that was cut off
    assert attempt.read_steps(path) == (20, [0.25, 1.5], 21, True)
    log.close()
    monkeypatch.delenv(attempt.SUPERVISED)
    log = attempt.StepLog(0)
    log.done(1.0)
    log.close()
    assert attempt.read_steps(path) == (20, [0.25, 1.5], 21, False)


def test_the_checkpoints_of_a_program_without_a_run_are_noted(tmp_path, monkeypatch):
    path, model = tmp_path / "steps", nn.Linear(2, 2)
    monkeypatch.setenv(attempt.SUPERVISED, str(path))
    for async_op in (False, True):
        saves = Checkpoints(tmp_path / str(async_op), async_op=async_op)
        for step in (3, 5):
            saves.save(step, model)
        saves.wait()
        assert attempt.read_steps(path) == (None, [], 5, False)
        assert path.read_text() == "saved 3\nsaved 5\n"
        path.unlink()
    log = attempt.StepLog(5)
    log.done(0.5)
    saves.save(6, model)
    saves.wait()
    assert attempt.read_steps(path) == (5, [0.5], None, True)       # the run says itself what it has saved
    log.close()
    saves.save(7, model)
    saves.wait()
    assert attempt.read_steps(path) == (5, [0.5], 7, False)
    assert Attempt(1, 1, saved=5).last == 5 and Attempt(1, 1, saved=5).place == "after the checkpoint of step 5"
    path.unlink()
    monkeypatch.delenv(attempt.SUPERVISED)
    saves.save(8, model)
    saves.wait()
    assert not path.exists()


@pytest.mark.parametrize("path, why", [("/dev/full", "No space left"), ("/no-such-folder/steps", "No such file")])
def test_steps_that_cannot_be_noted(path, why, monkeypatch, capsys):
    """The job goes on, and says it once."""
    monkeypatch.setenv(attempt.SUPERVISED, path)
    log = attempt.StepLog(0)
    log.done(1.0)
    log.close()
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and "isn't told" in said[0] and why in said[0]


def test_a_disk_that_becomes_full_in_a_line(tmp_path, monkeypatch, capsys):
    """What comes after half a line would be read as its other half."""
    path, write = tmp_path / "steps", os.write
    monkeypatch.setenv(attempt.SUPERVISED, str(path))
    log = attempt.StepLog(0)
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:3]))
    log.done(0.25)
    monkeypatch.setattr(os, "write", write)
    log.done(0.25)
    assert attempt.read_steps(path) == (0, [], None, True) and "No space left" in capsys.readouterr().err


# ---------------------------------------------------------------- faults

def test_faults_are_read(monkeypatch):
    monkeypatch.setenv(faults.VARIABLE, "kill rank=1 step=30 restart=0; sleep rank=3 seconds=0.05;")
    assert faults.planned() == [("kill", {"rank": 1, "step": 30, "restart": 0}, {}),
                                ("sleep", {"rank": 3}, {"seconds": 0.05})]
    assert str(faults.planned()[0]) == "kill rank=1 step=30 restart=0"
    for text, words in (("boil rank=1", "'boil' is no fault; one of kill, fail, sleep"),
                        ("kill rank=one", "rank needs a number, as in rank=1"),
                        ("kill rank", "rank needs a number"), ("kill step=1.5", "step needs a number, as in step=1"),
                        ("kill rank=1 rank=2", "rank is given twice; for two faults put ; between them"),
                        ("miscompute share=-inf", "share must be finite"),
                        ("kill seconds=3", "kill takes rank, step, restart, not 'seconds'")):
        monkeypatch.setenv(faults.VARIABLE, text)
        with pytest.raises(ValueError, match=words):
            faults.planned()
