"""A GPT that is cut into stages is the whole GPT, under its names, with whatever stands beside the pipeline."""

import functools

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import nn
from minitorch_dist.parallel.pipelines import cut_gpt
from tests.crews import crews

from . import gpt_stages_cases as cases

CASES = "tests.parallel.gpt_stages_cases:"


@functools.cache
def wanted(name, packs):
    return crews.call(CASES + "one_process", 1, (name, packs))[0]


def check_curve(n, name, packs, *job):
    """That n ranks have one process's losses and parameters; what each has sent. job: what `staged` takes besides."""
    losses, state = wanted(name, packs)
    everyone = crews.call(CASES + "staged", n, (name, packs, *job))
    for got_losses, got, _ in everyone:
        np.testing.assert_allclose(got_losses, losses, rtol=1e-10)
        assert set(got) == set(state)
        for key, value in state.items():
            np.testing.assert_allclose(got[key], value, rtol=1e-10, atol=1e-10, err_msg=key)
    return [sent for _, _, sent in everyone]


@pytest.mark.parametrize("name, packs, schedule, micro_batches, stage, n, sizes", [
    *((name, False, "1f1b", 2, 0, 2, {}) for name in cases.GPTS),
    ("tied", False, "interleaved", 4, 1, 4, {}), ("tied", True, "zb-h1", 2, 3, 4, {}),
    ("tied", False, "zb-v", 4, 2, 2, {}), ("untied", True, "1f1b", 4, 0, 4, {"pp": 4}),
    ("tied", False, "gpipe", 2, 0, 4, {"pp": 4}), ("tied", False, "1f1b", 2, 0, 4, {"tp": 2}),
    ("tied", True, "1f1b", 2, 0, 4, {"cp": 2}), ("deepseek", True, "zb-h1", 2, 1, 4, {}),
    ("rotary, tied", True, "1f1b", 2, 3, 4, {"tp": 2}), ("experts", False, "zb-h1", 4, 1, 4, {"ep": 2}),
    ("experts, tied", False, "zb-v", 4, 0, 2, {}), ("experts", False, "1f1b", 2, 2, 4, {"tp": 2}),
    ("experts", False, "dualpipev", 4, 0, 4, {"ep": 2}), ("experts, tied", False, "zb-h1", 11, 0, 2, {}),
    ("experts", False, "1f1b", 6, 1, 4, {"ep": 2})])
def test_one_curve(name, packs, schedule, micro_batches, stage, n, sizes):
    """AdamW, dropout, clipping, float64: the parameters of one process, on every rank, under the same names. Of 8 rows
    some of 11 micro-batches have none."""
    _, state = wanted(name, packs)
    for sent in check_curve(n, name, packs, schedule, micro_batches, stage, sizes):
        tied = "embed.weight" in state and "head.weight" not in state
        if n == 2:
            # A ring's all-reduce of the table between the first rank and the last, each step; zb-v has both on one.
            assert sent.get("pp tied", 0) == cases.STEPS * 8 * 16 * cases.VOCABULARY * (tied and schedule != "zb-v")


@pytest.mark.parametrize("name, packs, schedule, micro_batches, stage, n, sizes", [
    ("tied", False, "1f1b", 2, 0, 2, {}), ("untied", True, "zb-h1", 2, 3, 4, {}), ("tied", True, "zb-v", 4, 1, 4, {}),
    ("tied", False, "1f1b", 2, 2, 4, {"tp": 2}), ("deepseek", True, "1f1b", 2, 0, 4, {"cp": 2}),
    ("experts, tied", False, "1f1b", 4, 3, 4, {"ep": 2}), ("experts", False, "zb-h1", 2, 1, 4, {"tp": 2})])
def test_one_curve_of_losses_without_logits(name, packs, schedule, micro_batches, stage, n, sizes):
    check_curve(n, name, packs, schedule, micro_batches, stage, sizes, True)


@pytest.mark.parametrize("name, packs, schedule, micro_batches, stage, n, sizes, tiled, slices, lengths", [
    ("tied", False, "1f1b", 2, 0, 2, {}, False, 3, None), ("tied", False, "zb-h2", 1, 2, 4, {}, True, 5, None),
    ("untied", True, "zb-h1", 2, 3, 4, {}, True, 3, [1, 12, 3]),
    ("windows", True, "interleaved", 2, 0, 2, {}, True, 16, None),
    ("llama", True, "gpipe", 1, 0, 4, {"tp": 2}, False, 4, None),
    ("deepseek", False, "1f1b", 2, 1, 4, {}, False, 4, None),
    ("deepseek", False, "zb-h1", 2, 0, 2, {}, True, 3, [9, 2, 5]),
    ("blocks", False, "1f1b", 2, 0, 4, {"tp": 2}, False, 5, None),
    ("biased", True, "zb-h1", 4, 0, 4, {"ep": 2}, False, 3, None),
    ("rotary, tied", True, "1f1b", 2, 0, 4, {"pp": 4}, True, 6, None)])
def test_one_curve_of_sequences_in_slices(name, packs, schedule, micro_batches, stage, n, sizes, tiled, slices,
                                          lengths):
    check_curve(n, name, packs, schedule, micro_batches, stage, sizes, tiled, slices, lengths)


def test_a_last_stage_that_makes_no_losses():
    for found in crews.call(CASES + "no_losses", 2):
        assert "loss_sum=None, and the last stage's forward takes no `targets`" in found


def test_who_has_what():
    model = cases.gpt("tied")
    first, middle, last = cut_gpt(model, 3, [1, 1, 1, 1])
    assert [(s.first, s.last, [*s.blocks._modules]) for s in (first, middle, last)] == [
        (True, False, ["0"]), (False, False, ["1"]), (False, True, ["2", "3"])]
    names = [name for stage in (first, middle, last) for name, _ in stage.named_parameters()]
    assert sorted(names) == sorted([*(name for name, _ in model.named_parameters()), "embed.weight"])
    assert first.embed is model.embed and last.embed is not model.embed and last.blocks[-1] is model.blocks[3]
    tokens = np.zeros((2, 5), int)
    with mt.no_grad():
        model.eval()
        x = tokens
        for stage in (first, middle, last.eval()):
            x = stage(x)
        np.testing.assert_array_equal(x.numpy(), model(tokens).numpy())


def test_the_output_layer_counts():
    """Whose product is that of several blocks, where the vocabulary is large; the embedding costs nothing."""
    stages = cut_gpt(nn.GPT(3000, 8, layers=6, heads=2, dim=16), 3)
    assert [len(stage.blocks) for stage in stages] == [2, 3, 1]
    assert [len(s.blocks) for s in cut_gpt(nn.GPT(30, 8, layers=6, heads=2, dim=16), 3)] == [2, 2, 2]


@pytest.mark.parametrize("make, stages, costs, error, says", [
    (lambda: nn.Sequential(nn.Linear(2, 2)), 1, None, TypeError, "got a Sequential"),
    (lambda: nn.GPT(11, 4, layers=2, heads=2, dim=8), 3, None, ValueError, "2 blocks can't be cut into 3 stages"),
    (lambda: nn.GPT(11, 4, layers=2, heads=2, dim=8), 2, [1], ValueError, "1 costs for 2 blocks")])
def test_what_can_not_be_cut(make, stages, costs, error, says):
    with pytest.raises(error, match=f"cut_gpt.*{says}"):
        cut_gpt(make(), stages, costs)
