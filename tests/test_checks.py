"""What training programs can be asked to look at on their way, in all that have it; faults that can't strike."""

from pathlib import Path

import pytest

from minitorch_dist import attempt, comm, faults, nn
from tests import crews

ROOT = Path(__file__).parents[1]
TRAIN = [ROOT / "mnist_demo" / "train.py", "--data", "digits", "--hidden", "16", "--steps", "6"]


def started(n, fault, arguments, out):
    """The Run of a program under a fault."""
    return crews.launch([*arguments, "--out", out], n, variables={faults.VARIABLE: fault})


# ---------------------------------------------------------------- faults that can't strike

@pytest.mark.parametrize("fault, words", [
    ("flip parameter=90", "parameter=90: of the model on this rank there are 4"),
    ("flip-gradient rank=1 parameter=3 element=10", "element=10: of parameter=3 there are 10"),
    ("flip bit=32", "bit=32: of float32 there are 32"),
    ("kill rank=2", "kill rank=2: the ranks are 0 to 1"),
    ("sleep rank=1 seconds=0; kill step=7", "kill step=7: the run has 6 steps"),
    ("kill restart=1", "kill restart=1: nobody starts this job again; under minitorch-dist supervise it is"),
    ("flip parameter=-1", "'flip parameter=-1': parameter must be finite, and at least 0"),
    ("kill step=0", "'kill step=0': step must be finite, and at least 1"),
    ("sleep seconds=nan", "seconds must be finite, and at least 0")])
def test_what_can_never_strike_is_refused(tmp_path, fault, words):
    """On all ranks alike, before anything has begun; rank 0 says it."""
    run = started(2, fault, TRAIN, tmp_path / "run")
    assert run.returncode == 2 and words in run.stderr[0] and not run.stderr[1] and not (tmp_path / "run").exists()


def test_what_may_strike_after_a_restart_is_not_refused(monkeypatch):
    """Of a job that was started again on fewer ranks: rank 3's may have struck before."""
    world, model = comm.world(), nn.mlp([3])
    for name, value in ((faults.VARIABLE, "kill rank=3; kill rank=0 step=30; kill restart=2 step=5"),
                        (attempt.SUPERVISED, "steps"), (attempt.RESTARTS, "1")):
        monkeypatch.setenv(name, value)
    faults.refuse(world, model, 20)
    monkeypatch.setenv(attempt.RESTARTS, "0")
    with pytest.raises(ValueError, match=r"(?s)kill rank=3: the ranks are 0 to 0.*kill rank=0 step=30: the run has 20"):
        faults.refuse(world, model, 20)


def test_what_has_not_struck_is_told(tmp_path):
    """Of a run that comes from the checkpoint of its last step."""
    run = started(2, "sleep rank=1 seconds=0; miscompute rank=0 step=6", TRAIN, tmp_path).check()
    assert "hasn't struck" not in run.stdout[0]
    again = ["--save-every", "4", "--exact"]
    started(1, "", [*TRAIN, *again], tmp_path / "on").check()
    run = started(2, "sleep step=6 seconds=0; sleep rank=1 seconds=0", [*TRAIN, *again, "--resume"], tmp_path / "on")
    assert run.check().stdout[0].count("it hasn't struck") == 2


@pytest.mark.parametrize("fault, restarts, first, told", [
    ("kill step=5", 0, 0, True), ("kill step=5", 0, 5, True),
    ("kill step=5", 1, 5, False), ("kill step=6", 1, 5, True), ("kill rank=4", 1, 5, False),
    ("kill restart=1", 2, 5, False), ("kill step=5 restart=2", 2, 5, True), ("kill restart=3", 2, 5, True)])
def test_what_an_earlier_start_may_have_met_is_not_told(monkeypatch, fault, restarts, first, told):
    monkeypatch.setattr(faults, "struck", {"sleep rank=0"})
    monkeypatch.setenv(faults.VARIABLE, f"sleep rank=0; {fault}")
    monkeypatch.setenv(attempt.RESTARTS, str(restarts))
    assert [str(one) for one in faults.spared(comm.world(), first)] == [fault] * told


def test_a_program_without_steps_to_strike():
    run = crews.launch([ROOT / "examples" / "soup.py"], 1, variables={faults.VARIABLE: "kill rank=0"})
    assert run.returncode == 2 and "MINITORCH_FAULT is set, and strikes nothing in this program" in run.stderr[0]
