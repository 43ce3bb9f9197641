"""A token that goes to each rank once, however many of its experts are there: one curve, and as many rows as ranks."""

import itertools

import numpy as np
import pytest

from minitorch_dist.parallel.experts.once import trips, visits
from tests.crews import crews

CASES, MOE = "tests.parallel.once_cases:", "tests.parallel.moe_cases:"


@pytest.mark.parametrize(("tokens", "k", "experts", "ranks"), [(7, 3, 6, 2), (5, 2, 8, 4), (1, 4, 4, 1), (0, 2, 4, 2),
                                                               (9, 1, 3, 3)])
def test_trips_token_by_token(tokens, k, experts, ranks):
    rng = np.random.default_rng(tokens)
    expert = np.array([rng.permutation(experts)[:k] for _ in range(tokens)], int).reshape(tokens, k)
    there = [[t for t in range(tokens) if any(e * ranks // experts == r for e in expert[t])] for r in range(ranks)]
    chosen = [[(t, c) for t in range(tokens) for c in range(k) if expert[t, c] == e] for e in range(experts)]
    found = trips(expert, experts, ranks)
    assert found.tokens.tolist() == sum(there, []) and found.rows.tolist() == [len(each) for each in there]
    assert found.counts.tolist() == np.reshape([len(each) for each in chosen], (ranks, -1)).tolist()
    assert found.choices.tolist() == [t * k + c for each in chosen for t, c in each]
    assert found.row.tolist() == [there[e * ranks // experts].index(t) for e, each in enumerate(chosen)
                                  for t, _ in each]


@pytest.mark.parametrize(("experts", "k", "ranks"), [(6, 2, 3), (8, 3, 2), (4, 4, 4), (6, 5, 2), (5, 2, 1)])
def test_visits_of_tokens_that_choose_at_random(experts, k, ranks):
    """The mean over all choices of k experts."""
    each = [len({e * ranks // experts for e in chosen}) for chosen in itertools.combinations(range(experts), k)]
    assert visits(experts, k, ranks) == pytest.approx(np.mean(each), rel=1e-14)


@pytest.mark.parametrize(("n", "size", "accumulate", "tensor", "stage", "rows"), [
    (2, 2, 1, 1, 0, 8), (4, 2, 1, 1, 3, 8), (2, 2, 1, 1, 2, 13),
    *(pytest.param(*each, marks=pytest.mark.thorough) for each in ((4, 4, 2, 1, 0, 8), (4, 2, 1, 2, 0, 8)))])
def test_one_curve(n, size, accumulate, tensor, stage, rows):
    """A GPT, AdamW, float64: within 1e-10 of one process that adds up all experts' answers. Of batches of 13 the last
    has a sequence for one rank, and none for the other."""
    (losses, wanted), = crews.call(MOE + "train", 1, args=("no capacity", 1, rows == 8, 1, None, False, 1, 0, rows))
    found = crews.call(CASES + "trained", n, args=(size, False, accumulate, False, tensor, stage, rows))
    for got_losses, got in found[:1] if stage else found:
        np.testing.assert_allclose(got_losses, losses, rtol=1e-10)
        assert set(got) == set(wanted) and max(abs(got[name] - wanted[name]).max() for name in wanted) < 1e-10


@pytest.mark.parametrize(("pp", "size"), [pytest.param(1, 2, marks=pytest.mark.thorough), (2, 2)])
def test_in_a_pipeline(pp, size):
    (wanted, _), = crews.call(MOE + "pipelined", 1, args=(1, 1, "1f1b", 4, 8, None))
    for got in crews.call(CASES + "in_a_pipeline", pp * size, args=(pp, size)):
        assert set(got) == set(wanted) and max(abs(got[name] - wanted[name]).max() for name in wanted) < 1e-10


@pytest.mark.parametrize("n", [2, 3])
def test_a_rank_gets_a_row_of_each_token_that_wants_it(n):
    """Forward: 8 bytes for each expert's number and one for the rows', 4 for each choice's place, the rows, the gates
    (8 bytes), and a row of answers for each row. Backward: the last three again. Rows are fewer than choices."""
    size = 6
    for rank, (found, tables) in enumerate(crews.call(CASES + "sent", n, args=(None, size))):
        (rows, chosen), others = tables[rank], [r for r in range(n) if r != rank]
        out, asked = sum(rows[r] for r in others), sum(chosen[r] for r in others)
        back, answered = sum(tables[r][0][rank] for r in others), sum(tables[r][1][rank] for r in others)
        assert out < asked
        travel = size * 8 * (out + back)
        assert found["forward"] == (5, (n - 1) * (6 // n + 1) * 8 + 4 * asked + 8 * asked + travel)
        assert found["backward"] == (3, 8 * answered + travel)


@pytest.mark.parametrize("n", [2, 4])
def test_all_ranks_send_what_is_planned(n):
    """Where all pairs of experts are chosen equally often."""
    for counted, paper in crews.call(CASES + "beside_paper", n):
        assert counted == pytest.approx(paper, rel=1e-12) and counted > 0


def test_rows_and_answers_travel_in_the_dtype_of_products():
    """In autocast's 16 bits, though gates have 32, and so have the sums."""
    for rank, (found, tables) in enumerate(crews.call(CASES + "sent", 2, args=("bfloat16", 6))):
        (rows, chosen), back = tables[rank], tables[1 - rank][0][rank]
        out, asked = rows[1 - rank], chosen[1 - rank]
        assert found["forward"] == (5, 4 * 8 + 4 * asked + 4 * asked + 6 * 2 * out + 6 * 2 * back)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_rows_in_few_bits(n):
    """As in one process that adds up each rank's answers by themselves, and rounds what would travel."""
    for far in crews.call(CASES + "short", n):
        assert max(far) < 1e-12


@pytest.mark.parametrize(("n", "order"), [(2, 2), pytest.param(3, 1, marks=pytest.mark.thorough)])
def test_derivatives_equal_finite_differences_across_ranks(n, order):
    assert all(crews.call(CASES + "gradients", n, args=(order,)))


def test_checkpoint_sends_all_again():
    for same, calls in crews.call(CASES + "forgotten", 2):
        assert same and calls == [5 + 3, 2 * 5 + 3]


def test_refused_are_whole_experts_a_capacity_and_exact_mode():
    for said in crews.call(CASES + "refusals", 2):
        assert len(said) == 3
        assert "there are no divided experts here" in said[0]
        assert "capacity_factor=1.25: all places of the experts travel" in said[1]
        assert "in exact mode a row goes for each choice" in said[2]
