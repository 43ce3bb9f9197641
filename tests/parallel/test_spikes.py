"""Steps that are left out because their loss or gradient norm is far above the others'."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest

from minitorch_dist import optim, training
from tests import crews as crew
from tests.crews import crews

from .spikes_cases import BROKEN

TRAIN = Path(__file__).parents[2] / "mnist_demo" / "train.py"
CASES = "tests.parallel.spikes_cases:"


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("deviations, window", [(6.0, 128), (2.5, 7), (1.0, 20), (3.0, 4)])
def test_what_is_a_spike(seed, deviations, window):
    """By NumPy's medians, of values among which there are spikes, ever more of them, inf and NaN."""
    random = np.random.default_rng([seed, window])
    spikes = (random.random(400) < np.linspace(0, 0.4, 400)) * random.exponential(20, 400)
    values = random.standard_normal(400) + 3 + spikes
    values[[13, 200]] = np.inf, np.nan
    guard, kept, wanted = optim.SpikeGuard(deviations, window), [], []
    for step, value in enumerate(values):
        last = np.array(kept[-window:])
        if np.isfinite(value):
            if len(last) >= window // 2:
                usual = np.median(last)
                if value > usual + deviations * 1.4826 * np.median(np.abs(last - usual)):
                    wanted.append(step)
            kept.append(value)
        assert guard.spiked(step, norm=value) == (step in wanted)
    assert [spike.step for spike in guard.found] == wanted and len(wanted) > 5
    assert guard.at(wanted[-1]) == guard.found[-1] and guard.at(wanted[-1] + 1) is None


def test_few_of_normal_numbers_are_left_out():
    """Of 20,000 the share beyond 3 deviations, 0.135 %, and a little more: of a window the spread is an estimate."""
    guard = optim.SpikeGuard(3.0)
    for step, value in enumerate(np.random.default_rng(0).standard_normal(20_000)):
        guard.spiked(step, loss=value)
    assert 0.00135 <= len(guard.found) / 20_000 < 0.0035


def test_a_new_level_is_taken_after_half_a_window():
    guard, random = optim.SpikeGuard(6.0, window=16), np.random.default_rng(0)
    for step in range(60):
        guard.spiked(step, loss=random.random() + 100 * (step >= 30))
    assert [spike.step for spike in guard.found] == list(range(30, 38))


def test_either_value_is_enough_and_the_state_goes_on():
    guard, random = optim.SpikeGuard(6.0, window=10), np.random.default_rng(0)
    for step in range(10):
        assert not guard.spiked(step, loss=random.random(), norm=random.random())
    other = optim.SpikeGuard(6.0, window=10)
    other.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    for each in (guard, other):
        assert each.spiked(10, loss=0.5, norm=99.0) and each.spiked(11, loss=99.0, norm=0.5)
        assert [(s.step, s.what, s.value) for s in each.found] == [(10, "norm", 99.0), (11, "loss", 99.0)]
        assert str(each.found[0]).startswith("step 10 is left out: its norm is 99, where 0.")
    assert guard.found == other.found
    third = optim.SpikeGuard()
    third.load_state_dict(guard.state_dict())
    assert third.found == guard.found


@pytest.mark.parametrize("settings", [{"deviations": 0}, {"deviations": float("nan")}, {"deviations": float("inf")},
                                      {"window": 3}])
def test_settings_that_cannot_be(settings):
    with pytest.raises(ValueError, match=f"SpikeGuard: {next(iter(settings))}="):
        optim.SpikeGuard(**settings)


@pytest.mark.parametrize("way", ["ddp", "exact", "stage 1", "stage 2", "stage 3", "exact, 3"])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_step_left_out_is_a_batch_that_never_was(way, n, clip):
    """To the bit: parameters, and Adam's averages, by what they make of the steps behind."""
    left = crews.call(CASES + "trained", n, args=(way, "left out", None, clip))
    never = crews.call(CASES + "trained", n, args=(way, "not there", None, clip))
    taken = crews.call(CASES + "trained", n, args=(way, "taken", None, clip))
    for (state, steps, losses), (wanted, _, others), (harmed, _, _) in zip(left, never, taken, strict=True):
        assert steps == [BROKEN + 1] and losses[:BROKEN] + losses[BROKEN + 1:] == others
        assert state.keys() == wanted.keys()
        assert all((state[name] == wanted[name]).all() for name in state)
        assert not state or any((state[name] != harmed[name]).any() for name in state)


def test_beside_a_grad_scaler():
    more = "float16", None, "float32"
    (state, steps, _), = crews.call(CASES + "trained", 1, args=("ddp", "left out", *more))
    (wanted, _, _), = crews.call(CASES + "trained", 1, args=("ddp", "not there", *more))
    assert steps == [BROKEN + 1] and all((state[name] == wanted[name]).all() for name in state)


class Killed(BaseException):
    """As if the power had gone: nobody catches this."""


def test_the_demo_leaves_steps_out_and_says_so(tmp_path, monkeypatch):
    """The same ones on two ranks, and where it goes on from a checkpoint."""
    flags = ["--data", "digits", "--hidden", "16", "--steps", "120", "--exact", "--skip-spikes", "0.01", "--optimizer",
             "adam", "--lr", "0.02"]

    def summary(name):
        return json.loads((tmp_path / name / "summary.json").read_text())
    for name, n in (("one", 1), ("two", 2)):
        said = crew.launch([TRAIN, *flags, "--out", tmp_path / name], n=n, limit=120).check().stdout[0]
        assert said.count("is left out: its") == len(summary(name)["left_out"]) > 3
    log = training.Run.log

    def killed(run, *args):
        log(run, *args)
        if run.step == 100:
            raise Killed
    more, main = ["--save-every", "90", "--out", str(tmp_path / "on")], runpy.run_path(str(TRAIN))["main"]
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(training.Run, "log", killed)
        main([*flags, *more])
    assert main([*flags, *more, "--resume"]) == 0
    assert summary("on")["resumed_at"] == 90 and summary("one")["left_out"][0] < 90
    for name in ("two", "on"):
        for key in ("left_out", "parameters_sha256"):
            assert summary(name)[key] == summary("one")[key]
