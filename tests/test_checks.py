"""What training programs can be asked to look at on their way, in all that have it; faults that can't strike."""

import json
import re
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import attempt, comm, faults, nn, training
from minitorch_dist.__main__ import main
from minitorch_dist.checks import Checks
from minitorch_dist.parallel import DistributedDataParallel
from minitorch_dist.parallel.stragglers import Report
from minitorch_dist.testing import ranks
from tests import crews, here

ROOT = Path(__file__).parents[1]
TRAIN = [ROOT / "mnist_demo" / "train.py", "--data", "digits", "--hidden", "16", "--steps", "6"]
EXAMPLES = {    # name -> program and its options, for 6 steps
    "pipeline": ["--data", "digits", "--hidden", "16,16", "--stages", "2", "--steps", "6"],
    "sharded": ["--data", "digits", "--hidden", "16", "--replicas", "2", "--steps", "6"],
    "gpt": ["--layers", "1", "--dim", "16", "--heads", "2", "--batch-size", "12", "--steps", "6"],
    "grpo": ["--warm-steps", "2", "--steps", "6", "--questions", "4", "--group", "2"],
    "experts": ["--steps", "6", "--batch-size", "8"],
    "mesh": ["--pp", "2", "--dim", "16", "--layers", "2", "--batch-size", "8", "--steps", "6"],
}
EXAMPLES = {name: [ROOT / "examples" / f"{'fully_' * (name == 'sharded')}{name}.py", *options]
            for name, options in EXAMPLES.items()}


def started(n, fault, arguments, out):
    """The Run of a program under a fault."""
    return crews.launch([*arguments, "--out", out], n, variables={faults.VARIABLE: fault})


# ---------------------------------------------------------------- faults that can't strike

@pytest.mark.parametrize("fault, words", [
    ("flip parameter=90", "parameter=90: of the model on this rank there are 4"),
    ("flip-gradient rank=1 parameter=3 element=10", "element=10: of parameter=3 there are 10"),
    ("flip bit=32", "bit=32: of float32 there are 32"),
    ("kill rank=2", "kill rank=2: the ranks are 0 to 1"),
    ("sleep rank=1 seconds=0; kill step=7", "kill step=7: the run ends with step 6"),
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
    for name, value in ((faults.VARIABLE, "kill rank=3; kill rank=0 step=30; kill restart=2 step=40"),
                        (attempt.SUPERVISED, "steps"), (attempt.RESTARTS, "1")):
        monkeypatch.setenv(name, value)
    faults.refuse(world, model, 20)
    monkeypatch.setenv(attempt.RESTARTS, "0")
    with pytest.raises(ValueError, match=r"(?s)kill rank=3: the ranks are 0 to 0.*step=30: the run ends with step 20$"):
        faults.refuse(world, model, 20)


def test_a_fault_of_a_part_of_the_ranks_names_the_worlds(monkeypatch):
    """Of ranks 4 and 6, here the second; what has struck is told by its text."""
    part = SimpleNamespace(rank=1, size=2, world_ranks=[4, 6], all_gather_object=lambda value: [value, value])
    monkeypatch.setattr(faults, "struck", set())
    monkeypatch.setenv(faults.VARIABLE, "miscompute rank=6 share=-0.25; miscompute rank=4 share=3; miscompute rank=1; "
                                        "flip rank=4 parameter=99")      # of which the other one knows
    assert faults.of_step(part, 1)("computed", 8.0) == 6.0 and faults.struck == {"miscompute rank=6 share=-0.25"}
    with pytest.raises(ValueError, match="^MINITORCH_FAULT: miscompute rank=1: the ranks are 4 to 6$"):
        faults.refuse(part, nn.mlp([3]), 9)


def test_the_bit_that_is_asked_for_turns_over():
    """Of a float32 number 31 is its sign, 23 the last one of its exponent."""
    p, q = (mt.tensor(np.array([[1, 2], [4, 8]], np.float32), requires_grad=True) for _ in range(2))
    faults.flip([p, q], parameter=1, element=2, bit=31)
    assert p.numpy().tolist() == [[1, 2], [4, 8]] and q.numpy().tolist() == [[1, 2], [-4, 8]]
    with pytest.raises(ValueError, match="parameter=1 has no gradient in this step"):
        faults.flip_gradient([p, q], parameter=1)
    p.grad, q.grad = (mt.tensor(np.full((2, 2), 4, np.float32)) for _ in range(2))
    faults.flip_gradient([p, q], parameter=1, element=3, bit=23)
    assert p.grad.numpy().tolist() == [[4, 4], [4, 4]] and q.grad.numpy().tolist() == [[4, 4], [4, 2]]


def test_what_struck_an_earlier_run_of_this_process_is_told_of_the_next(monkeypatch):
    monkeypatch.setattr(faults, "struck", {"sleep step=2"})
    monkeypatch.setenv(faults.VARIABLE, "sleep step=2")
    args, said = SimpleNamespace(check_replicas=None, stragglers=None), []
    Checks(args, comm.world(), nn.mlp([3]), 3).end(said.append)
    assert said == ["MINITORCH_FAULT: sleep step=2: it hasn't struck"]


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


@pytest.mark.parametrize("step, told", [(40, 0), (41, 1), (80, 1)])
def test_faults_count_updates_where_a_step_has_several(monkeypatch, step, told):
    """Of 4 each: after step 10, from which a job went on, 40 are behind it."""
    monkeypatch.setenv(faults.VARIABLE, f"sleep step={step}")
    monkeypatch.setenv(attempt.RESTARTS, "1")
    model, said = DistributedDataParallel(nn.mlp([3]), comm.world()), []
    args = SimpleNamespace(check_replicas=None, stragglers=None)
    checks = Checks(args, comm.world(), model, 20, updates=4)
    checks.after(11, None, False, said.append)
    checks.end(said.append)
    assert len(said) == told
    monkeypatch.setenv(attempt.RESTARTS, "0")
    monkeypatch.setenv(faults.VARIABLE, "sleep step=81")
    with pytest.raises(ValueError, match="the run ends with step 80"):
        Checks(args, comm.world(), model, 20, updates=4)


def test_a_program_without_steps_to_strike():
    run = crews.launch([ROOT / "examples" / "soup.py"], 1, variables={faults.VARIABLE: "kill rank=0"})
    assert run.returncode == 2 and "MINITORCH_FAULT is set, and strikes nothing in this program" in run.stderr[0]


# ---------------------------------------------------------------- the examples

@pytest.mark.parametrize("name, n, check, fault, words", [
    ("pipeline", 4, "--check-replicas", "flip rank=3 step=3", "ranks 1, 3 hold different bits, and there is no "
     "majority to tell which are right; first in '2.weight', float32[16, 16]"),
    ("sharded", 4, "--check-replicas", "flip rank=3 step=3", "ranks 1, 3 hold different bits"),
    ("mesh", 4, "--check-replicas", "flip rank=3 step=3", "ranks 1, 3 hold different bits"),
    ("grpo", 3, "--check-replicas", "flip rank=0 step=3", "rank 0 against ranks 1, 2"),
    ("experts", 3, "--check-replicas", "flip rank=2 step=3", "rank 2 against ranks 0, 1"),
    ("experts", 3, "--check-work", "miscompute rank=0 step=4", "rank 0 against ranks 1, 2"),
    pytest.param("gpt", 3, "--check-work", "miscompute rank=1 step=4",
                 "rank 1 against ranks 0, 2; first in 'the gradient of embed", marks=pytest.mark.thorough),
    ("gpt", 3, "--check-replicas", "flip-gradient rank=1 step=3 bit=30", "rank 1 against ranks 0, 2; first in 'emb")])
def test_wrong_ranks_are_found_in_the_examples(tmp_path, name, n, check, fault, words):
    """Each among those that hold, or compute, the same; the slow one is told before."""
    run = ranks.launch([*EXAMPLES[name], check, "4", "--stragglers", "3", "--out", tmp_path], n, limit=60,
                       env={faults.VARIABLE: f"{fault}; sleep rank=1 seconds=0.2"})
    assert run.returncode and not run.timed_out
    assert any(words in said for said in run.stderr), run.report()
    assert "rank 1 is slow: it computes" in run.stdout[0]


@pytest.mark.thorough
def test_an_example_is_supervised(tmp_path, monkeypatch):
    """A GPT, of which a rank's memory flips: it goes on from the checkpoint before, to an undisturbed one's bits."""
    gpt = [*EXAMPLES["gpt"], "--exact"]
    crews.launch([*gpt, "--out", tmp_path / "whole"], 1).check()
    monkeypatch.setenv(faults.VARIABLE, "flip rank=1 step=4 restart=0")
    checked = [*gpt, "--save-every", "2", "--check-replicas", "3", "--out", tmp_path / "on"]
    assert main(["supervise", "-n", "2", "--backoff", "0", "--", *map(str, checked)]) == 0
    whole, on = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "on"))
    assert on["parameters_sha256"] == whole["parameters_sha256"] and on["resumed_at"] == 2


def test_what_cannot_be_compared_is_said(tmp_path):
    """Pieces without a copy: an error. Stages without another rank on them: told, for there may be more ranks again."""
    run = crews.launch([*EXAMPLES["sharded"], "--replicas", "1", "--check-replicas", "2", "--out", tmp_path], 2)
    assert run.returncode == 2 and "there is no copy to compare them with" in run.stderr[0] and not run.stderr[1]
    run = crews.launch([*EXAMPLES["pipeline"], "--check-replicas", "2", "--out", tmp_path], 2).check()
    assert "no two ranks hold the same parameters, and nothing was compared" in run.stdout[0]
    run = crews.launch([*TRAIN, "--check-work", "2", "--check-replicas", "3", "--out", tmp_path], 1).check()
    assert "one rank has nobody to compare its work with" in run.stdout[0] and "no two ranks hold" in run.stdout[0]
    run = crews.launch([*TRAIN, "--check-work", "2", "--check-replicas", "3", "--out", tmp_path], 2).check()
    assert "nobody" not in run.stdout[0] and "no two ranks" not in run.stdout[0]


@pytest.mark.parametrize("name", ["train", "pipeline", "sharded", "gpt", "grpo"])
def test_what_is_before_the_first_step_is_no_part_of_it(tmp_path, monkeypatch, name):
    """As 1,000 seconds that a run takes to begin, by a clock that is put forward: of one step the table tells."""
    enter, clock, late = training.Run.__enter__, time.perf_counter, [0]

    def begin(run):
        late[0] += 1000
        return enter(run)
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + late[0])
    monkeypatch.setattr(training.Run, "__enter__", begin)
    program = {**EXAMPLES, "train": TRAIN}[name] + ["--stages", "1"] * (name == "pipeline")
    alone = ["--replicas", "1"] * (name == "sharded")
    said = here.run(*program, *alone, "--steps", "1", "--stragglers", "1", "--out", tmp_path).stdout
    assert float(re.search(r"rank 0 +(\S+) +\S+\n", said)[1]) < 900_000


def test_slow_ranks_are_told_when_they_are_others():
    model, said = DistributedDataParallel(nn.mlp([3]), comm.world()), []
    checks = Checks(SimpleNamespace(check_replicas=None, stragglers=1), comm.world(), model, 6)
    reports = iter([Report(1, [], [], slow) for slow in ({}, {1: 2.0}, {1: 2.5}, {0: 2.0}, {}, {0: 3.0})])
    checks.stragglers.step = lambda: next(reports)
    told = []
    for step in range(1, 7):
        checks.after(step, None, False, said.append)
        told.append(len(said))
    assert told == [0, 1, 1, 2, 2, 3] and said[1].startswith("step 4: ") and "rank 0 is slow" in said[1]


def test_when_what_is_checked(monkeypatch):
    """Every so many steps, and before a checkpoint: bits after the step, work of the step and of the next owner."""
    model, found = DistributedDataParallel(nn.mlp([3]), comm.world()), []
    monkeypatch.setattr("minitorch_dist.checks.check_same_bits", lambda *args: found.append(("bits", args[1])))
    monkeypatch.setattr(training, "check_work", lambda *args, step, turn, seed: found.append(("work", step, turn)))
    monkeypatch.setattr("minitorch_dist.checks.Stragglers", lambda world, every, peers: found.append((every, peers)))
    args = SimpleNamespace(check_replicas=4, check_work=3, stragglers=7)
    checks = Checks(args, comm.world(), model, 9, peers="of a stage", seed=0)
    assert found.pop() == (7, "of a stage")
    for step in range(1, 10):
        checks.after(step, None, step == 5, None)
    assert found == [("work", 2, 1), ("bits", 4), ("bits", 5), ("work", 4, 1), ("work", 5, 2), ("bits", 8),
                     ("work", 8, 3)]


def test_work_is_checked_before_a_checkpoint(tmp_path):
    """Which isn't written then."""
    run = ranks.launch([*TRAIN, "--check-work", "100", "--save-every", "2", "--out", tmp_path], 3, limit=60,
                       env={faults.VARIABLE: "miscompute rank=1 step=4"})
    assert run.returncode and any("rank 1 against ranks 0, 2" in said for said in run.stderr), run.report()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
