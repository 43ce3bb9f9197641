"""QK-clip on ranks: the same scores are clipped, however the batch, the model and the state are cut."""

import functools

import numpy as np
import pytest

from tests.crews import crews, threads

from . import qk_clip_cases as cases

CASES = "tests.parallel.qk_clip_cases:"


@functools.cache
def wanted(name, packs=False):
    return crews.call(CASES + "train", 1, (name, (), {"packs": packs}))[0]


def check_same(got, found):
    """Of a rank that may have some of the heads: scores are -inf nowhere, and clipped in each step."""
    assert set(got) == set(found)
    for key, value in found.items():
        np.testing.assert_allclose(got[key], value, rtol=1e-10, atol=1e-10, err_msg=key)


def test_some_are_clipped():
    """What the other tests are about: in each step some heads, in most layers at some time, and others are not."""
    for name in cases.GPTS:
        history, _ = wanted(name)
        times = [len(clipped) for *_, clipped in history]
        layers = {path for *_, clipped in history for path, _ in clipped}
        scores = history[0][1]
        assert min(times) >= 2 and min(times) < sum(map(len, scores.values())) and len(layers) > len(scores) / 2


@pytest.mark.parametrize("name, n, sizes, how", [
    ("gpt", 2, {}, {}), ("gpt", 3, {}, {"stage": 1}), ("llama", 2, {}, {"stage": 2, "looks": True}),
    ("deepseek", 3, {}, {"stage": 3}),
    ("gpt", 2, {}, {"packs": True, "accumulate": 2}), ("gpt", 2, {"tp": 2}, {}),
    ("llama", 2, {"tp": 2}, {"sequence": True}), ("deepseek", 2, {"tp": 2}, {"sequence": True}),
    ("gpt", 2, {"cp": 2}, {"packs": True}), ("llama", 2, {"cp": 2}, {"how": "all_to_all", "packs": True}),
    ("deepseek", 2, {"cp": 2}, {"how": "all_to_all"}), ("llama", 4, {"cp": 4}, {}),
    ("llama", 4, {"tp": 2}, {"stage": 3}), ("deepseek", 4, {"tp": 2}, {"stage": 2}),
    ("gpt", 4, {"tp": 2, "cp": 2}, {"stage": 3, "packs": True}),
    ("blocks", 2, {}, {"stage": 3}), ("blocks", 4, {"tp": 2, "cp": 2}, {"how": "all_to_all"})])
def test_one_curve(name, n, sizes, how):
    """float64: losses, scores and parameters of one process, on every rank."""
    history, state = wanted(name, how.get("packs", False))
    tp = sizes.get("tp", 1)
    for rank, (found, got) in enumerate(crews.call(CASES + "train", n, (name, sizes, how))):
        np.testing.assert_allclose([loss for loss, *_ in found], [loss for loss, *_ in history], rtol=1e-10)
        for (_, scores, _), (_, whole, _) in zip(found, history, strict=True):
            mine = {path: np.split(np.array(each), tp)[rank % tp] for path, each in whole.items()}
            check_same({path: np.array(each) for path, each in scores.items()}, mine)
        if got:     # a sharded model's rank 0 has it
            check_same(got, state)


@pytest.mark.parametrize("name, schedule, micro_batches, stage, n, sizes", [
    ("gpt", "1f1b", 2, 0, 2, {}), ("llama", "zb-v", 4, 1, 4, {}), ("deepseek", "interleaved", 4, 3, 4, {}),
    ("gpt", "zb-h1", 3, 0, 4, {"tp": 2}), ("llama", "1f1b", 2, 0, 4, {"cp": 2})])
def test_stages_of_a_pipeline(name, schedule, micro_batches, stage, n, sizes):
    """Micro-batches are forwards of one step."""
    history, state = wanted(name)
    for rank, (losses, scores, got) in enumerate(crews.call(CASES + "staged", n, (
            name, schedule, micro_batches, stage, sizes))):
        np.testing.assert_allclose(losses, [loss for loss, *_ in history], rtol=1e-10)
        for found, (_, whole, _) in zip(scores, history, strict=True):
            tp = sizes.get("tp", 1)
            mine = {path: np.split(np.array(each), tp)[rank % tp] for path, each in whole.items()}
            check_same({path: np.array(each) for path, each in found.items()}, mine)
        if got:
            check_same(got, state)


@pytest.mark.parametrize("name, stage", [("gpt", 0), ("deepseek", 0), ("llama", 3)])
def test_exact_mode_has_one_set_of_bits(name, stage):
    found = {n: crews.call(CASES + "exact_bits", n, (name, stage), env=threads(n)) for n in (1, 2, 4)}
    (bits, history), = found[1]
    assert any(clipped for *_, clipped in history)
    for n in (2, 4):
        for got, others in found[n]:
            assert others == history and (got == bits or stage and not got)


@pytest.mark.parametrize("how, n", [(None, 2), ("ring", 2), ("ring", 4), ("all_to_all", 2)])
def test_what_is_sent(how, n):
    """One all-reduce of a number per head; a ring's keys once more; nothing for whole sequences, by heads or not."""
    model = cases.gpt("llama")
    heads, layers, kv_dim = 4, 4, 2 * 4
    assert len(model.blocks) == layers
    for noted, clipped in crews.call(CASES + "counted", n, (how,)):
        elements = layers * 2 * (n - 1) * (cases.LENGTH // n) * kv_dim      # batch 2, of this rank's positions
        if how == "ring":
            assert noted.pop("send") == (layers * (n - 1), 8 * elements)
        assert not {op: both for op, both in noted.items() if both[1]}, noted
        assert set(clipped) == {"all_reduce"} and clipped["all_reduce"][0] == 1
        assert clipped["all_reduce"][1] == 8 * heads * layers * 2 * (n - 1) // n


@pytest.mark.parametrize("what", ["threshold", "layers"])
def test_ranks_that_clip_differently(what):
    for message in crews.call(CASES + "different", 2, (what,)):
        assert "greatest scores of 4 attentions" in message and f"clipped to {cases.THRESHOLD}" in message


def test_a_model_in_no_wrapper():
    ends = crews.call(CASES + "unwrapped", 2)
    for message, scores, state in ends:
        assert "QKClip: which of the 2 ranks have samples of one batch?" in message
        assert scores == ends[0][1]
        assert all((state[name] == value).all() for name, value in ends[0][2].items())
