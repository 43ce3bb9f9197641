"""Mixed precision on several ranks: one curve to the last bit in exact mode, and steps that all leave out together."""

import json
import runpy
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from minitorch_dist import optim, training
from minitorch_dist.flat import BLOCK
from tests.crews import crews, threads

from . import mixed_cases as cases
from .hook_cases import HOOKS

CASES = "tests.parallel.mixed_cases:"
EPS = {"float16": 2.0 ** -10, "bfloat16": 2.0 ** -7}
each_dtype = pytest.mark.parametrize("amp", EPS)


def assert_same(found, expected):
    assert found[0] == expected[0] and found[2] == expected[2]
    assert set(found[1]) == set(expected[1])
    for name, value in expected[1].items():
        np.testing.assert_array_equal(found[1][name], value, err_msg=name)


@pytest.fixture(scope="module")
def alone():
    return crews.call(CASES + "exact_curves", 1, (["ddp"], list(cases.SETTINGS)), env=threads(1))[0]


def test_in_float32_the_scaler_changes_no_bit(alone):
    """Clipping included; the factor has grown."""
    scaled, plain = alone["ddp", None, True, 0.5], alone["ddp", None, False, 0.5]
    assert scaled[2][-1] == 2.0 ** 17
    assert_same((*scaled[:2], plain[2]), plain)


def test_the_curves_can_tell(alone):
    """A factor that was too large: steps were left out, and others were made; 16 bits are not float32's."""
    for clip in (None, 0.5):
        factors = [2.0 ** 22, *alone["ddp", "float16", True, clip][2]]
        left_out = sum(after < before for before, after in zip(factors, factors[1:], strict=False))
        assert 1 <= left_out <= 3
    low, exact = alone["ddp", "float16", True, 0.5], alone["ddp", None, True, 0.5]
    assert abs(low[0][0] / exact[0][0] - 1) < EPS["float16"] and low[0] != exact[0]


def test_bfloat16_needs_no_scaler_and_is_not_harmed_by_one(alone):
    """The curve is float32's but for its 8 bits; with a scaler it has the same bits, of a factor that has grown."""
    plain, scaled, exact = (alone["ddp", *settings] for settings in (
        ("bfloat16", False, 0.5), ("bfloat16", True, 0.5), (None, False, 0.5)))
    assert_same((*scaled[:2], plain[2]), plain)
    assert scaled[2][-1] == 2.0 ** 17
    assert all(0 < abs(low / full - 1) < EPS["bfloat16"] for low, full in zip(plain[0], exact[0], strict=True))


@pytest.mark.parametrize("n, ways", [(2, ["stage 1", "stage 3"]), (4, ["ddp", "stage 2"])])
def test_exact_mode_has_one_set_of_bits_in_mixed_precision(alone, n, ways):
    for seen in crews.call(CASES + "exact_curves", n, (ways, list(cases.MIXED))):
        for (way, *settings), found in seen.items():
            if found[1]:        # whole values are on rank 0
                assert_same(found, alone["ddp", *settings])
            assert found[2] == alone["ddp", *settings][2], way


@pytest.mark.parametrize("name, n, pp, amp", [("1f1b", 2, 2, "float16"), ("zb-h1", 4, 2, "float16"),
                                              ("1f1b", 2, 2, "bfloat16"), ("zb-v", 4, 2, "float16")])
def test_a_pipeline_has_the_bits_of_one_process_in_mixed_precision(alone, name, n, pp, amp):
    for found in crews.call(CASES + "pipelined", n, (name, pp, amp)):
        assert_same(found, alone["ddp", amp, amp == "float16", None])


def test_a_pipeline_changes_its_precision_between_runs():
    for first, mixed, last in crews.call(CASES + "pipelined_in_both_precisions", 2):
        assert first == last != mixed == pytest.approx(first, rel=0.01)


@pytest.mark.parametrize("hook", HOOKS)
def test_what_is_left_out_follows_the_factor_and_outlives_a_step_with_nan(hook):
    plain, bits, after = (crews.call(CASES + "compressed", 2, (hook, *args))[0]
                          for args in ((None, 1), (2.0 ** 10, 1), (2.0 ** 10, 1000, (3,))))
    assert bits[0] == plain[0] and all(np.array_equal(a, b) for a, b in zip(bits[2], plain[2], strict=True))
    assert after[1] == [3] and after[0][:3] == plain[0][:3] and all(np.isfinite(a).all() for a in after[2])


# ---------------------------------------------------------------- inf on one rank

@pytest.mark.parametrize("cut", cases.CUTS)
def test_inf_on_one_rank_is_everybody_s(cut):
    """Nobody's parameters change in that step, all of them do in the others, and the factor is the same everywhere."""
    for seen in crews.call(CASES + "one_rank_has_nan", 2, (cut,)):
        for steps in seen:
            assert steps == [(True, 256.0), (False, 128.0), (True, 128.0)]


def test_a_sum_overflows_where_it_is_rounded_to_float16_and_in_exact_mode_that_is_the_same_on_any_ranks():
    """65,536 is more than float16 holds, 32,768 isn't; what ranks add up is float32."""
    for n in (1, 2, 4):
        expected = {("alike", False): n == 1, ("opposite", False): n > 1, ("alike", True): False,
                    ("opposite", True): False}
        assert crews.call(CASES + "overflowing_sums", n) == [expected] * n


# ---------------------------------------------------------------- models that are cut

@pytest.mark.parametrize("cut, whole", [("tensor", "whole"), ("sequence", "whole"), ("experts", "whole experts")])
@each_dtype
def test_a_model_that_is_cut_has_the_whole_one_s_gradients_but_for_rounding(cut, whole, amp):
    expected = crews.call(CASES + "cut_gradients", 1, (whole, amp))[0][0]
    for grads, _, _ in crews.call(CASES + "cut_gradients", 2, (cut, amp)):
        assert set(grads) == set(expected)
        for name, g in expected.items():
            assert g.dtype == np.float32
            assert np.linalg.norm(grads[name] - g) < 8 * EPS[amp] * np.linalg.norm(g), name


@each_dtype
def test_what_ranks_add_up_is_added_in_float32(amp):
    """No engine adds up 16 bits, and MPI has no such type: copy_to's cotangent would be refused."""
    for cut, whole in crews.call(CASES + "columns", 2, (amp,)):
        assert np.linalg.norm(cut - whole) < 4 * EPS[amp] * np.linalg.norm(whole)


def test_bfloat16_is_moved_and_not_added_up():
    both = [np.arange(4) + 0.5, np.arange(4) + 10.5]
    for rank, (found, error) in enumerate(crews.call(CASES + "moved", 2)):
        expected = {"all_gather": np.concatenate(both), "broadcast": both[1], "send": both[1 - rank],
                    "all_to_all": np.concatenate([x[2 * rank:2 * rank + 2] for x in both])}
        expected["window"] = expected["all_gather"]
        assert set(found) == set(expected) and "bfloat16 can't be reduced" in error
        for name, values in expected.items():
            assert found[name].dtype.name == "bfloat16"
            np.testing.assert_array_equal(found[name].astype(float), values, err_msg=name)


def test_ranks_gather_no_more_than_two_units_at_a_time():
    """Autocast keeps what it has cast, and not the gathered values under it."""
    for peaks in crews.call(CASES + "gathered", 2):
        unit = -(-(96 * 96 + 96) // (2 * BLOCK)) * 2 * BLOCK * 4
        assert peaks[True] <= peaks[False] == 2 * unit


# ---------------------------------------------------------------- programs

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "mnist_demo" / "train.py"


class Killed(BaseException):
    """As if the power had gone."""


def test_a_run_that_was_broken_off_goes_on_with_its_factor(tmp_path, monkeypatch):
    """To the last bit, steps left out and a factor on its way included."""
    monkeypatch.setattr(optim, "GradScaler", partial(optim.GradScaler, 2.0 ** 22, growth_interval=3))
    main = runpy.run_path(str(DEMO))["main"]
    flags = ["--data", "digits", "--hidden", "16", "--dropout", "0.2", "--optimizer", "adamw", "--steps", "14",
             "--exact", "--amp", "float16", "--save-every", "6"]

    def end(folder):
        summary = json.loads((folder / "summary.json").read_text())
        return summary["parameters_sha256"], (folder / "history.jsonl").read_text(), summary["amp"]
    assert main([*flags, "--out", str(tmp_path / "whole")]) == 0
    log = training.Run.log

    def broken_off(self, *args):
        log(self, *args)
        if self.step == 11:
            raise Killed
    with monkeypatch.context() as patch:
        patch.setattr(training.Run, "log", broken_off)
        with pytest.raises(Killed):
            main([*flags, "--out", str(tmp_path / "parts")])
    assert main([*flags, "--out", str(tmp_path / "parts"), "--resume"]) == 0
    assert end(tmp_path / "parts") == end(tmp_path / "whole")
    assert end(tmp_path / "whole")[2] == "float16"
    with pytest.raises(SystemExit):     # other settings
        main([*flags[:-4], "--save-every", "6", "--out", str(tmp_path / "parts"), "--resume"])


def test_what_amp_doesn_t_go_with(capsys):
    main = runpy.run_path(str(DEMO))["main"]
    for flags in (["--dtype", "float64"], ["--mine"]):
        with pytest.raises(SystemExit, match="2"):
            main(["--amp", "float16", *flags])
        assert f"without {flags[0]}" in capsys.readouterr().err


@each_dtype
def test_stage_3_keeps_no_weights_in_16_bits(amp):
    """They are cast again of what is gathered again; the gradients' bits are those of the whole model."""
    found = crews.call(CASES + "kept_in_16_bits", 2, (amp,))[0]
    (whole, activations, _, size), (cut, rest, gathered, _) = found[False], found[True]
    assert activations - rest >= 1.8 * size and gathered == 0
    assert set(whole) == set(cut)
    for name, value in whole.items():
        assert np.abs(value).max() > 0.1
        np.testing.assert_array_equal(cut[name], value, err_msg=name)


def test_ranks_without_parts_hear_of_those_that_have_some():
    assert crews.call(CASES + "stage_without_parts", 4) == [(True, 1.0)] * 4
