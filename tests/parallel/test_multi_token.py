"""A model that learns several tokens ahead is one process's, however it is divided."""

import numpy as np
import pytest

from tests.crews import crews

CASES = "tests.parallel.multi_token_cases:"


@pytest.mark.parametrize("n, tp, stage", [(4, 2, 3), (2, 1, 0), (2, 2, 0), (2, 1, 2)])
def test_one_curve(n, tp, stage):
    wanted, = crews.call(CASES + "train", 1, args=(1, 0))
    for rank, found in enumerate(crews.call(CASES + "train", n, args=(tp, stage))):
        assert set(found) == set(wanted) or stage and rank >= tp and not found
        assert all(abs(found[name] - wanted[name]).max() < 1e-10 for name in found)


def test_ranks_of_divided_experts_guess_together():
    """A guess counts where it is right on all of them: their passes are of as many tokens."""
    found = crews.call(CASES + "guessed_together", 2)
    for cut, text, _ in found:
        np.testing.assert_array_equal(cut.tokens, text)
    assert found[0][0][1:] == found[1][0][1:]
    assert found[0][2].right != found[1][2].right       # alone


def test_parts_of_sequences_are_refused():
    for tensor, context, inside in crews.call(CASES + "refused", 2):
        assert "the model puts positions together with later tokens" in tensor
        assert "the model, of class MultiTokenPrediction, looks at several positions" in context
        assert "MultiTokenPrediction: positions are put together with later tokens, of which the GPT has a" in inside
