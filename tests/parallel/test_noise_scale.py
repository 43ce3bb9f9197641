"""The gradient noise scale, of gradients whose mean and covariance are known."""

import contextlib
import json
import math
from pathlib import Path

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import data, nn, optim, training
from minitorch_dist.parallel import DistributedDataParallel
from minitorch_dist.parallel.noise_scale import GradientNoiseScale, estimates
from tests import crews as crew
from tests.crews import crews, threads

from .noise_cases import SIZES, Rows, deviations, mean, passes, samples

TRAIN = Path(__file__).parents[2] / "mnist_demo" / "train.py"
CASES = "tests.parallel.noise_cases:"
TRACE, SQUARE = (deviations() ** 2).sum(), (mean() ** 2).sum()


def by_groups(x, sizes):
    """(tr(Σ), |G|²) by the variance within groups, from the samples themselves."""
    groups = np.split(x, np.cumsum(sizes)[:-1])
    within = sum(len(g) * ((g.mean(0) - x.mean(0)) ** 2).sum() for g in groups)
    trace = within / (len(groups) - 1)
    return trace, (x.mean(0) ** 2).sum() - trace / len(x)


def test_the_estimates_are_right_in_the_mean():
    """Of normal gradients, whose estimates' variances are known: within 4 standard errors, and not within much more
    than these."""
    noise, steps, found = GradientNoiseScale(Rows(), decay=0), 250, []
    for step in range(steps):
        noise.model.zero_grad()
        passes(noise.model, [noise], samples(step), SIZES)
        noise.update()
        found.append((noise.trace, noise.square))
    fourth, n = (deviations() ** 4).sum(), sum(SIZES)
    of_trace = 2 * fourth / (len(SIZES) - 1)
    of_square = 4 * (mean() ** 2 * deviations() ** 2).sum() / n + 2 * fourth / n ** 2 + of_trace / n ** 2
    for got, wanted, variance in zip(np.transpose(found), (TRACE, SQUARE), (of_trace, of_square), strict=True):
        assert abs(got.mean() - wanted) < 4 * math.sqrt(variance / steps)
        assert math.isclose(got.var(), variance, rel_tol=0.3)
        assert 4 * math.sqrt(variance / steps) < 0.4 * wanted       # so that a bias would be seen


def test_equal_passes_are_the_papers():
    """McCandlish et al. 2018, A.1: |G|² and S of |G_small|², |G_big|², of batches of 8 and 32."""
    small, big = 3.7, 1.9
    # |G_small|² is the mean of |32/8 · g_i|²
    trace, square = estimates(4 * small * (8 / 32) ** 2 / 8, big, 4, 32)
    assert math.isclose(square, (32 * big - 8 * small) / (32 - 8))
    assert math.isclose(trace, (small - big) / (1 / 8 - 1 / 32))


@pytest.mark.parametrize("n, ways", [(1, ["alone", "ddp"]), (2, ["ddp", "1", "2", "3"]), (3, ["ddp", "3"])])
def test_the_same_on_any_ranks_and_in_any_stage(n, ways):
    for way in ways:
        for found, state, sent in crews.call(CASES + "measured", n, (way,)):
            wanted = [by_groups(samples(step), SIZES) for step in range(3)]
            np.testing.assert_allclose(found, wanted, rtol=1e-12, err_msg=way)
            averages = np.array([0.125, 0.25, 0.5]) @ wanted
            assert state["steps"] == 3
            np.testing.assert_allclose((state["trace"], state["square"]), averages, rtol=1e-12)
            if n == 2 and way == "ddp":
                assert sent == {("world", "all_reduce"): 3 * 8}


@pytest.mark.parametrize("n", [1, 2])
def test_exact_mode_has_a_pass_per_micro_shard(n):
    for way in ("exact", "exact, 3"):
        found, _, _ = crews.call(CASES + "measured", n, (way, (4, 4)), env=threads(n))[0]
        np.testing.assert_allclose(found, [by_groups(samples(step, 8), (4, 4)) for step in range(3)], rtol=1e-12)


def test_a_step_that_the_scaler_leaves_out_is_not_taken():
    assert crews.call(CASES + "overflows", 2) == [(0, 2.0 ** 22)] * 2


def test_parts_of_matrices():
    (wanted,) = crews.call(CASES + "of_parts", 1, (1,))
    for found in crews.call(CASES + "of_parts", 2, (2,)):
        np.testing.assert_allclose(found, wanted, rtol=1e-10)


@pytest.mark.parametrize("stage", [0, 3])
def test_training_stays_what_it_is(stage):
    for digests, (plain, scaled) in crews.call(CASES + "with_and_without", 2, (stage,)):
        assert len(set(digests)) == 1
        np.testing.assert_allclose(scaled, plain, rtol=1e-12)
        assert plain[0] > 0


def test_a_run_says_it(tmp_path):
    """The same number from two ranks as from one in two pieces, and from one that goes on from its end."""
    flags, found = ["--data", "digits", "--hidden", 16, "--dtype", "float64", "--steps", 5, "--noise-scale"], []
    for n, more in ((2, []), (1, ["--accumulate", 2, "--save-every", 5]), (1, ["--accumulate", 2, "--resume"])):
        out = crew.launch([TRAIN, *flags, *more, "--out", tmp_path / str(n)], n).check().stdout[0]
        found.append(json.loads((tmp_path / f"{n}/summary.json").read_text())["gradient_noise_scale"])
        assert "--resume" in more or f"gradient noise scale {found[-1]:,.0f}: batches of 64" in out
    np.testing.assert_allclose(found[1:], found[0], rtol=1e-9)
    for more, wanted in (([], "--accumulate 2"), (["--accumulate", 2, "--batch-size", 1], "2 samples or more"),
                         (["--exact", "--micro-shards", 1], "--micro-shards 2")):
        said = crew.launch([TRAIN, *flags, *more, "--out", tmp_path / "none"], 1)
        assert said.returncode == 2 and wanted in said.stderr[0]
    # The digits' last batch of an epoch has one sample.
    crew.launch([TRAIN, *flags, "--accumulate", 2, "--batch-size", 359, "--out", tmp_path / "last"], 1).check()


def test_a_parameter_that_checkpoints_share_counts_once():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(np.full((2, 2), 0.5))

        def forward(self, x):
            for _ in range(2):
                x = mt.checkpoint(lambda x: mt.tanh(x @ self.w))(x)
            return x.sum()
    model = Twice()
    noise = GradientNoiseScale(model)
    x = np.array([[1.0, 2.0], [0.5, -1.0]])
    for row in x:
        before = 0 if model.w.grad is None else model.w.grad.numpy().copy()
        (model(row[None]) / 2).backward()
        wanted = ((model.w.grad.numpy() - before) ** 2).sum()
        np.testing.assert_allclose(*noise.seen.values(), wanted, rtol=1e-12)
        noise.after_backward(1)


def test_a_step_that_broke_off_counts_for_nothing():
    found = []
    for wrong in (False, True):
        mt.manual_seed(4)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(5, 3, dtype=np.float64)))
        noise, left = GradientNoiseScale(model, decay=0), []

        def loss_sum(model, shard, left=left):
            if left.pop(0):
                raise MemoryError
            return nn.cross_entropy(model(shard.inputs), shard.labels, reduction="sum")
        random = np.random.default_rng(0)
        (batch,) = data.Loader(random.standard_normal((8, 5)), np.arange(8) % 3, 8).epoch(0)
        for begin in ([0, True], [0, 0]) if wrong else ([0, 0],):
            left[:] = begin
            with contextlib.suppress(MemoryError):
                training.train_step(model, optim.SGD(model.parameters(), lr=0.1), batch, loss_sum, model.comm, seed=0,
                                    step=0, accumulate=2, noise=noise)
        found.append((noise.trace, noise.square))
    assert found[0] == found[1]


def test_what_it_says():
    noise = GradientNoiseScale(Rows(), decay=0.5)
    assert math.isnan(noise.scale)
    noise._take(30.0, 0.5)
    assert math.isclose(noise.trace, 30) and math.isclose(noise.scale, 60)
    noise._take(60.0, 0.5)      # a ratio of the averages, not an average of ratios
    assert math.isclose(noise.trace, 50) and math.isclose(noise.scale, 100)
    assert noise.costs(20) == (6, 1.2)      # section 2.3: (6 - 1)(1.2 - 1) = 1
    assert noise.told(20) == ("gradient noise scale 100: batches of 20 take 6.00 times the fewest steps, and 1.20 "
                              "times the fewest samples")
    other = GradientNoiseScale(Rows(), decay=0.5)
    other.load_state_dict(noise.state_dict())
    assert (other.trace, other.square) == (noise.trace, noise.square)
    noise._take(1.0, -9.0)
    assert noise.scale == math.inf
    noise.load_state_dict({"steps": 1, "trace": 1.0, "square": 0.0})
    assert noise.scale == math.inf
    noise = GradientNoiseScale(Rows())
    noise._take(-1e-15, 2.0)        # samples that are all the same, rounded
    assert noise.scale == 0 and noise.costs(20) == (1, math.inf)


def test_what_it_refuses():
    for said in crews.call(CASES + "one_pass", 2):
        assert "4 samples had 1 backward pass" in said
    for said in crews.call(CASES + "experts", 2):
        assert "divided over the ranks" in said
    with pytest.raises(ValueError, match="decay is 1"):
        GradientNoiseScale(Rows(), decay=1)
    noise = GradientNoiseScale(Rows())
    for odd in (-1, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"samples={odd}"):
            noise.after_backward(odd)
        with pytest.raises(ValueError, match=f"grad_scale={odd}"):
            noise.update(odd)
    noise.model(samples(0)).backward()
    with pytest.raises(RuntimeError, match="hasn't been told"):
        noise.update()
    with pytest.raises(RuntimeError, match="a second backward pass"):
        noise.model(samples(0)).backward()
    noise.forget()
    noise.after_backward(0)
    with np.errstate(invalid="ignore"):
        noise.model(samples(0) * np.inf).backward()
    noise.after_backward(4)
    noise.model(samples(0)).backward()
    noise.after_backward(4)
    noise.update()      # not finite: nothing is taken
    assert noise.steps == 0
    noise.remove()
    noise.model(samples(0)).backward()
    assert not noise.seen
    next(noise.model.parameters()).requires_grad_(False)
    with pytest.raises(RuntimeError, match="frozen or unfrozen"):
        noise.update()
