"""Sequences that go through a pipeline's stages in slices: gradients, memory and messages beside those of whole ones,
and what is refused. That curves are one process's, in all forms: test_gpt_stages.py."""

import warnings

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import comm, ledger, nn
from minitorch_dist.nn.transformer import FAMILIES
from minitorch_dist.parallel.offload import offload_activations
from minitorch_dist.parallel.pipelines import Pipeline, lengths_of_equal_work, schedule_of
from minitorch_dist.parallel.pipelines.slices import Growing, Slices
from minitorch_dist.qk_clip import QKClip
from tests.crews import crews

from .slices_cases import BATCH, TIME, batch_of, gpt, loss_sum

CASES = "tests.parallel.slices_cases:"


def pipeline_of(model, name="1f1b", slices=1, lengths=None, micro_batches=3):
    return Pipeline([model], comm.world(), schedule_of(name, 1, micro_batches, slices=slices), lengths)


def found(model, loss=loss_sum, **how):
    """(the loss, {name: gradient}, the measure, the Pipeline) of one run."""
    pipeline = pipeline_of(model, **how)
    total = pipeline.run(batch_of(), loss, seed=1, step=0, units=TIME)
    right = pipeline.evaluate(batch_of(), lambda y, labels: (y.numpy().argmax(2) == labels).sum())
    return total, {name: p.grad.numpy() for name, p in model.named_parameters()}, right, pipeline


def same(one, other):
    np.testing.assert_allclose(one[0], other[0], rtol=1e-12)
    assert one[1].keys() == other[1].keys() and one[2] == other[2]
    for name, gradient in one[1].items():
        np.testing.assert_allclose(gradient, other[1][name], rtol=1e-10, atol=1e-14, err_msg=name)


@pytest.mark.parametrize("how", [
    {"slices": 2, "lengths": [1, 12]}, {"slices": 3, "name": "zb-h1"}, {"slices": 13}, {"slices": 4, "name": "gpipe"},
    {"slices": 5, "name": "zb-h2", "lengths": [4, 1, 1, 5, 2]}], ids=str)
@pytest.mark.parametrize("more", [
    {"dropout": 0.2}, {"positions": "rotary", "kv_heads": 2, "window": 4}, {"window": ("linear", "delta")},
    {"window": "2x3", "gated": True}, {"sinks": True, "qk_norm": True, "window": (3, None)},
    FAMILIES["deepseek"]], ids=str)
def test_slices_have_the_gradients_of_whole_sequences(more, how):
    plain = found(gpt(**more))
    model = gpt(**more)
    one = found(model, **how)
    same(one, plain)
    assert one[3].live == {"gpipe": 3 * how["slices"]}.get(how.get("name"), how["slices"])
    assert all(m.context is None for m in model.modules() if hasattr(m, "context"))      # it is as it was
    assert [*map(type, model.modules())] == [*map(type, gpt(**more).modules())]
    logits = model.eval()(batch_of().inputs[:2])
    np.testing.assert_array_equal(logits.numpy(), gpt(**more).eval()(batch_of().inputs[:2]).numpy())


@pytest.mark.parametrize("more", [{"dropout": 0.2, "window": (5, None)}, {"window": ("linear", "delta")}], ids=str)
def test_checkpointed_blocks_run_again_as_the_slice_they_were(more):
    model = gpt(**more)
    for block in model.blocks:
        block.forward = mt.checkpoint(block.forward)
    same(found(model, slices=3), found(gpt(**more)))


def test_what_is_kept_may_lie_on_disk(tmp_path):
    """Arrays that several ops keep, or views of one, are written once: what comes behind them would be missing."""
    model = gpt()
    with offload_activations(model, tmp_path, min_bytes=1):
        one = found(model, slices=3)
    same(one, found(gpt()))


def test_compiled_blocks_run_uncompiled():
    """What is kept for the next slice would be of the slice that was captured."""
    model = gpt(window=(None, "linear"))
    for i, block in enumerate(model.blocks):
        model.blocks[i] = mt.compile(block)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        one = found(model, slices=3)
    plain = found(gpt(window=(None, "linear")))
    np.testing.assert_allclose(one[0], plain[0], rtol=1e-12)
    for mine, gradient in zip(one[1].values(), plain[1].values(), strict=True):
        np.testing.assert_allclose(mine, gradient, rtol=1e-10, atol=1e-14)
    assert len(said) == 2 and all("what a slice of its sequences leaves" in str(w.message) for w in said)


def test_in_16_bits_gradients_add_up_in_32():
    """Of 40 slices of a position each the first key's gradient has 40 addends."""
    dtype = np.dtype(mt.bfloat16)
    kept, tenth = Growing((1, 1, 40, 1), np.zeros(1, dtype)), np.float32(np.array(0.1, dtype))
    for start in range(40):
        kept.add(np.ones((1, 1, 1, 1), dtype), 0, slice(start, start + 1))
    for start in reversed(range(40)):
        gradient = kept.settle(np.full((1, 1, start + 1, 1), 0.1, dtype), 0, slice(start, start + 1))
        assert gradient.dtype == dtype and gradient.shape == (1, 1, 1, 1)
        assert gradient.item() == pytest.approx(tenth * (40 - start), rel=2 ** -8)      # rounded once


def test_in_16_bits_gradients_are_those_of_32_but_for_rounding():
    with mt.autocast("bfloat16"):
        one = found(gpt(dtype=np.float32), slices=13)
    for gradient, wanted in zip(one[1].values(), found(gpt())[1].values(), strict=True):
        assert np.abs(gradient - wanted).max() < 0.1 * np.abs(wanted).max()


@pytest.mark.parametrize("window", [None, 4, "2x3"])
def test_the_greatest_scores_are_seen(window):
    """By those who clip them."""
    def greatest(**how):
        model = gpt(window=window)
        clip = QKClip([model], 1e-3)
        pipeline_of(model, **how).run(batch_of(), loss_sum, seed=1, step=0)
        return clip.step().greatest
    assert greatest(slices=4) == pytest.approx(greatest(), rel=1e-12)


@pytest.mark.parametrize("lengths", [[5, 8], [1, 4, 4, 3, 1]])
def test_what_is_held(lengths, monkeypatch):
    """Of one attention, behind the last forward: the weights of a slice's queries with the keys so far, keys and values
    as one array each, and all else as of whole sequences. From the first backward on their gradients, too; behind
    the last one nothing but what was given."""
    dim, heads, held = 8, 2, []
    mt.manual_seed(0)
    model = nn.Sequential(nn.MultiHeadAttention(dim, heads, causal=True))
    x = np.random.default_rng(2).standard_normal((BATCH, TIME, dim)).astype(np.float32)
    through = Slices.through

    def square(y, labels):
        loss = (y * y).sum()
        held.append(book.live["activation"])
        return loss

    def behind(*args):
        through(*args)
        held.append(book.live["activation"])
    monkeypatch.setattr(Slices, "through", behind)
    for cut in (None, lengths):
        pipeline = pipeline_of(model, "gpipe", len(cut or [0]), cut, micro_batches=1)
        with ledger.record(memory=True) as book:
            pipeline.run(batch_of(x, np.zeros((BATCH, TIME))), square, seed=0, step=0)
    n = len(lengths)
    whole, *forward, back = held[:n + 2]
    scores, keys = BATCH * heads * 4 * int(lengths @ np.cumsum(lengths)), 2 * BATCH * TIME * dim * 4
    assert forward[-1] - whole == scores - BATCH * heads * 4 * TIME ** 2 + keys
    assert len(held) == 2 * n + 1 and back == forward[-2] + keys and held[-1] == x.nbytes


def test_evaluation_holds_one_micro_batch_at_a_time():
    pipeline = pipeline_of(gpt(), slices=4)
    kept, held = [attention.kept for attention in pipeline.slices.of_chunk[0].values()], []
    pipeline.evaluate(batch_of(), lambda y, labels: held.append([*map(len, kept)]) or 0)
    assert held == [[1, 1]] * 12 and not any(kept)
    pipeline.run(batch_of(), loss_sum, seed=0, step=0)
    assert not any(kept)


@pytest.mark.parametrize("n, slices, lengths", [(2, 4, None), (3, 2, [9, 4])])
def test_no_more_is_sent(n, slices, lengths):
    """And rank r of p has p - r + s - 1 slices at once."""
    for rank, ((whole, _, loss), (sliced, live, again)) in enumerate(zip(
            crews.call(CASES + "sent", n, (1, None)), crews.call(CASES + "sent", n, (slices, lengths)), strict=True)):
        assert sliced == whole > 0 and live == n - rank + slices - 1 and again == pytest.approx(loss, rel=1e-12)


def test_lengths_of_equal_work():
    """Each slice's share of Σ (ratio + keys) is what rounding to whole positions leaves."""
    for time, slices, ratio in ((512, 4, 384), (4096, 8, 768), (97, 3, 0), (31, 1, 5)):
        lengths = lengths_of_equal_work(time, slices, ratio)
        ends = np.cumsum(lengths)
        work = [sum(ratio + t + 0.5 for t in range(end - n, end)) for n, end in zip(lengths, ends, strict=True)]
        assert len(lengths) == slices and ends[-1] == time and lengths == sorted(lengths, reverse=True)
        assert max(work) - min(work) <= 2 * (ratio + time)       # a position or two
    assert lengths_of_equal_work(100, 4, 1e9) == [25] * 4
    for wrong, words in (((3, 4, 0), "each must have one at least"), ((8, 0, 1), "0 slices: a sequence comes in one")):
        with pytest.raises(ValueError, match=words):
            lengths_of_equal_work(*wrong)


@pytest.mark.parametrize("name, words", [
    ("not causal", "0, of class MultiHeadAttention, isn't causal"), ("weights dropped", "drops weights with probab"),
    ("another sequence", "of class CrossAttention, looks at several"), ("batch norm", "1, of class BatchNorm, looks"),
    ("convolution", "of class Conv1d, looks at several"), ("capacity", "capacity_factor=1.25: who finds a place"),
    ("balance", "has balance=0.01, a product of means"), ("divided", r"has a part of each sequence already"),
    ("exact", "in exact mode: sums over positions")])
def test_stages_that_cant_have_slices(name, words):
    """All ranks are told, whoever has such a stage."""
    for said in crews.call(CASES + "refused", 2, (name,)):
        assert words in said and "slices" in said


@pytest.mark.parametrize("lengths, inputs, labels, words", [
    ([4, 9], None, None, r"lengths \[4, 9\] of the slices, of which the schedule has 3"),
    ([5, 8, 0], None, None, "a whole number of positions for each, 1 or more"),
    ([4, 4, 4], None, None, "13 positions, in 3 slices of 4, 4, 4: they must add up"),
    (None, np.zeros((BATCH, 2), int), np.zeros((BATCH, 2), int), "2 positions, in 3 slices of 1, 1, 0"),
    (None, None, np.zeros(BATCH, int), r"inputs \(2, 13\) and labels \(2,\) in 3 slices"),
    (None, np.zeros(BATCH), np.zeros(BATCH), r"inputs \(2,\) and labels \(2,\)")])
def test_what_has_no_slices(lengths, inputs, labels, words):
    with pytest.raises(ValueError, match=words):
        pipeline_of(gpt(), slices=3, lengths=lengths).run(batch_of(inputs, labels), loss_sum, seed=0, step=0)


def test_packed_states_are_refused():
    rows = np.stack([batch_of().inputs, np.zeros((BATCH, TIME), int)], 2)
    with pytest.raises(ValueError, match="packed documents, whose states would go from slice to slice"):
        pipeline_of(gpt(window="linear"), slices=2).run(batch_of(rows), loss_sum, seed=0, step=0, packed=True)


@pytest.mark.parametrize("window", [None, "linear"])
def test_a_slice_whose_loss_hangs_on_nothing_is_told(window):
    """What later slices say of its keys would be lost."""
    def loss(logits, labels):
        return loss_sum(logits, labels) * 0.0 if logits.shape[1] == 6 else loss_sum(logits, labels)

    def cut_off(logits, labels):
        return mt.tensor(0.0) if logits.shape[1] == 6 else loss_sum(logits, labels)
    found(gpt(window=window), loss, slices=2, lengths=[6, 7])
    with pytest.raises(RuntimeError, match="what later slices say of its keys is lost"):
        found(gpt(window=window), cut_off, slices=2, lengths=[6, 7])
    found(gpt(window=window), cut_off, slices=2, lengths=[7, 6])        # nobody looks at the last one's


def test_a_layer_that_takes_other_positions_is_told():
    class Longer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiHeadAttention(16, 4, causal=True)

        def forward(self, x):
            return self.attention(mt.concatenate([x, x], 1))[:, :x.shape[1]]
    x = np.zeros((BATCH, TIME, 16), np.float32)
    with pytest.raises(ValueError, match="works on 10 positions, in a slice of 5"):
        pipeline_of(nn.Sequential(Longer()), slices=3).run(batch_of(x, x), lambda y, _: y.sum(), seed=0, step=0)
