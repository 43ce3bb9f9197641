"""Pipeline.evaluate: the forwards alone give what the undivided model gives, and change nothing."""

import numpy as np
import pytest

from tests.crews import crews, threads

CASES = "tests.parallel.pipeline_evaluation_cases:"


@pytest.mark.parametrize("name, n, pp, m, chunks, wrapper", [
    ("gpipe", 2, 2, 3, 1, None), ("1f1b", 3, 3, 5, 1, None), ("1f1b", 4, 2, 4, 1, "ddp"), ("1f1b", 4, 2, 4, 1, "exact"),
    ("interleaved", 2, 2, 4, 2, None), ("zb-h1", 2, 2, 3, 1, None), ("zb-v", 2, 2, 5, 2, None),
    ("dualpipev", 2, 2, 5, 2, "ddp"), ("1f1b", 4, 2, 3, 1, 1), ("1f1b", 4, 2, 3, 1, 3), ("zb-v", 4, 2, 5, 2, 3)])
def test_evaluation_is_the_whole_models(name, n, pp, m, chunks, wrapper):
    """Between steps of training, whose curve doesn't change by it; the last of the batches has fewer rows."""
    arguments = name, pp, m, chunks, wrapper
    curves = [losses for losses, _ in crews.call(CASES + "trained", n, args=(*arguments, False), env=threads(1))]
    for curve, (losses, found) in zip(curves, crews.call(CASES + "trained", n, args=(*arguments, True), env=threads(1)),
                                      strict=True):
        assert losses == curve and len(found) == 2
        for got, wanted, same, _ in found:
            np.testing.assert_allclose(got, wanted, rtol=1e-12)
            assert got[2] == (32 if wrapper == "exact" else 29) and same


@pytest.mark.parametrize("m", [2, 3])
def test_what_is_sent(m):
    """Of 29 samples in 4 batches, whose rows are divided by two: outputs go up, float64, 11 wide at the cut, with a
    word of 128 bytes before the first; nothing comes down; and stage 3 gathers its parameters, of 3 layers and of 4,
    once per batch, however many micro-batches it has."""
    everywhere = crews.call(CASES + "trained", 4, args=("1f1b", 2, m, 1, 3, True), env=threads(1))
    for rank, (_, found) in enumerate(everywhere):
        last, dp = rank % 2, rank // 2
        rows = sum(n * (dp + 1) // 2 - n * dp // 2 for n in (8, 8, 8, 5))
        for *_, sent in found:
            assert sent.get(("pp", "send"), (0, 0)) == ((0, 0) if last else (4 * m + 1, 8 * rows * 11 + 128))
            assert sent["dp", "all_gather"][0] == 4 * (3, 4)[last]


@pytest.mark.parametrize("packed", [False, True])
def test_a_gpts_losses_by_targets(packed):
    for got, wanted in crews.call(CASES + "stages_of_gpt", 2, args=(packed,)):
        np.testing.assert_allclose(got, wanted, rtol=1e-12)


def test_errors_say_what_to_do():
    zero, one = crews.call(CASES + "errors", 2)
    expected = {"nothing": ("TypeError", "measure gives None: give sums over the samples"),
                "text": ("TypeError", "measure gives '2'"),
                "each sample": ("ValueError", "of shapes (2,), (3,): give SUMS"),
                "uneven": ("ValueError", "of shapes (), (2,)")}
    assert set(one[0]) == set(expected) and not any(zero[0].values())
    for name, (kind, words) in expected.items():
        assert one[0][name] is not None and one[0][name][0] == kind and words in one[0][name][1], one[0][name]
    for said in zero[1], one[1]:
        assert len(said) == 2 and all(text.startswith("MismatchError") for text in said)
        assert "measure=None, and the last stage's forward takes no `targets`" in said[0]
        assert "Pipeline.evaluate" in said[1] and "Pipeline.run" in said[1]
