"""A loss that is no number any more ends a training: at once, on all ranks, in words, with what was saved."""

import json
import runpy
import warnings
from pathlib import Path

import numpy as np
import pytest

import minitorch_dist as mt
from examples import federated
from minitorch_dist import comm, divergence, optim, training
from minitorch_dist.divergence import Diverged
from minitorch_dist.parallel import DistributedDataParallel
from tests import crews
from tests.test_training import loss_sum, setting

ROOT = Path(__file__).parents[1]
FAR = ["--data", "digits", "--hidden", "33,17", "--lr", "1e30", "--save-every", "1"]


class Scaler:
    def __init__(self, enabled):
        self.enabled = enabled


@pytest.mark.parametrize(("loss", "scaler", "ends"), [
    (2.5, None, False), (1e300, None, False), (np.inf, None, True), (np.nan, None, True), (-np.inf, None, True),
    (np.inf, Scaler(True), False), (np.inf, Scaler(False), True), (np.nan, Scaler(True), True)])
def test_which_losses_end_a_training(loss, scaler, ends):
    if not ends:
        assert divergence.check(loss, 7, None, scaler) is None
        return
    with pytest.raises(Diverged, match=f"^step 7: the loss is {loss}: the training has diverged"):
        divergence.check(loss, 7, None, scaler)


def test_the_largest_learning_rate_is_told():
    groups = [{"params": [mt.tensor(np.ones(2), requires_grad=True)], "lr": rate} for rate in (0.5, 1234.0)]
    with pytest.raises(Diverged, match="at a learning rate of 1234: "):
        divergence.check(np.nan, 3, optim.SGD(groups, lr=1.0))


@pytest.mark.parametrize("step, learned, why", [(1, True, "the training has diverged"), (2, False, "nothing has been")])
def test_of_rounds_the_first_may_have_learned(step, learned, why):
    with pytest.raises(Diverged, match=f"^step {step}: the loss is nan: {why}"):
        divergence.check(np.nan, step, learned=learned)


def test_the_rate_is_blamed_for_the_steps_of_a_first_round(capsys):
    """FedSGD makes one in a round; the other makes several, each with the rate."""
    with pytest.raises(SystemExit, match="1"):
        federated.main(["--rounds", "1", "--lr", "1e30"])
    out, err = capsys.readouterr()
    assert "FedSGD" in out and err.startswith("step 1: the loss is nan") and "the training has diverged" in err


def test_a_first_loss_that_is_nan_has_no_learning_rate_to_blame():
    with pytest.raises(Diverged, match="^step 1: the loss is nan: nothing has been learned yet: look .* in the data"):
        divergence.check(np.nan, 1)


def test_numpy_is_quiet_of_what_a_loss_tells():
    with warnings.catch_warnings(), divergence.quiet():
        warnings.simplefilter("error")
        large, zero = np.full(1, 1e308), np.zeros(1)
        found = large * 10, large / zero, zero / zero, np.log(zero), np.log(-large)
    assert np.array(found).astype(str).ravel().tolist() == ["inf", "inf", "nan", "-inf", "nan"]


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_step_that_finds_nan_leaves_the_parameters_alone(clip):
    """Nor does NumPy warn, of numbers that grow or of what is no number."""
    _, _, batch, model = setting()
    model = DistributedDataParallel(model, comm.world())
    optimizer = optim.SGD(model.parameters(), lr=1.7e308)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(Diverged, match=r"the loss is inf, at a learning rate of 1\.7e\+308"):
            for step in range(9):
                before = [p.numpy().copy() for p in model.parameters()]
                training.train_step(model, optimizer, batch, loss_sum, comm.world(), seed=0, step=step, clip=clip)
    assert step > 0 and np.isfinite(before[0]).all()
    for was, p in zip(before, model.parameters(), strict=True):
        np.testing.assert_array_equal(p.numpy(), was)
    optimizer = optim.SGD(model.parameters(), lr=1.7e308, weight_decay=10.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss, _ = training.train_step(model, optimizer, batch, loss_sum, comm.world(), seed=0, step=step, finite=False)
    assert loss == np.inf       # it goes on, if asked to


@pytest.mark.parametrize(("program", "flags"), [
    ("mnist_demo/train.py", ["--async-save"]), ("mnist_demo/train.py", ["--exact"]),
    ("examples/pipeline.py", ["--stages", "2"])], ids=["async", "exact", "pipeline"])
def test_a_run_that_diverges_keeps_what_was_saved(tmp_path, program, flags):
    run = crews.launch([ROOT / program, *FAR, *flags, "--out", tmp_path / "run"], n=2, limit=60)
    assert run.returncode == 1 and not run.timed_out, run.report()
    history = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    done = len(history)
    assert done >= 1 and all(np.isfinite(line["loss"]) for line in history)
    first, second = run.stderr[0].splitlines()      # and no warning, no traceback
    assert first.startswith(f"step {done + 1}: the loss is ") and "learning rate of " in first
    assert f"the checkpoint of step {done} stays" in second and run.stderr[1] == ""
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == {
        f"step-{step:08d}" for step in range(max(1, done - 1), done + 1)}
    assert not (tmp_path / "run" / "summary.json").exists()


LOOPS = {       # programs with a loop of their own -> what makes them short
    "diloco": ["--steps", "20"], "distill": ["--few", "70"], "federated": ["--rounds", "2"],
    "gossip": ["--steps", "20"],
    "lottery_ticket": ["--hidden", "33"], "mixed_precision": ["--hidden", "33"], "quantize": ["--hidden", "33"]}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_of_its_own_ends_in_one_line_too(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings(), pytest.raises(SystemExit) as ended:
        warnings.simplefilter("error")
        runpy.run_path(ROOT / "examples" / f"{name}.py")["main"](["--data", "digits", "--lr", "1e30", *LOOPS[name]])
    said = capsys.readouterr().err.splitlines()
    assert ended.value.code == 1 and len(said) == 1
    assert said[0].startswith("step ") and ": the loss is nan, at a learning rate of " in said[0]


def test_where_one_worker_of_a_parameter_server_diverges_all_ranks_end_together(tmp_path):
    """Between two pulls, by its own steps."""
    flags = ["--mode", "async", "--n-fetch", "3", "--local-lr", "1e30", "--hidden", "33", "--steps", "9"]
    run = crews.launch([ROOT / "examples" / "parameter_server.py", *flags, "--out", tmp_path], n=3, limit=60)
    assert run.returncode == 1 and not run.timed_out, run.report()
    (said,), *others = (text.splitlines() for text in run.stderr)
    assert said.startswith("step 2: the loss is nan: the training has diverged") and others == [[], []]
