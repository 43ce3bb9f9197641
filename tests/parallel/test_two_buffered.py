"""PipeDream-2BW: the numbers of one process whose gradients are a step late, two versions held, no pause."""

import numpy as np
import pytest

from minitorch_dist.parallel.pipelines.schedules import one_forward_one_backward, play
from tests.crews import crews, threads

CASES = "tests.parallel.two_buffered_cases:"


def late(counts, m, name, size=1):
    from tests.parallel import two_buffered_cases as cases
    batches, calls = cases.batches_of(sum(counts)), []
    for count in counts:
        calls.append([batches.pop(0) for _ in range(count)])
    return cases.late(calls, m, name, size)


@pytest.mark.parametrize("n, pp, m, counts, name, wrapped, remade", [
    (1, 1, 1, [4], "sgd", 0, False), (2, 2, 2, [7], "sgd", 0, False),
    (2, 2, 5, [1, 4, 2], "adamw", 0, False), (3, 3, 3, [6], "adamw", 0, True),
    (4, 4, 4, [5], "sgd", 25, False), (3, 3, 7, [2, 3], "sgd", 25, True),
    (4, 2, 3, [6], "adamw", 25, False), (4, 2, 2, [3, 1], "sgd", 25, True), (4, 2, 3, [3, 2], "adamw", 1e-4, False)])
def test_the_numbers_of_one_process_with_late_gradients(n, pp, m, counts, name, wrapped, remade):
    """Dropout, rates that fall, batches of 13 that nothing divides, and smaller ones: to the bit where one rank has all
    samples, within 1e-10 where they are divided. Of several buckets, too, which are cut anew after the first batch."""
    losses, wanted = late(counts, m, name, n // pp)
    seen = set()
    arguments = pp, counts, m, name, wrapped, remade
    for got_losses, got, coords, live, beside, weights in crews.call(CASES + "train", n, args=arguments):
        np.testing.assert_allclose(got_losses, losses, rtol=1e-12)
        for key, value in got.items():
            if n == pp:
                np.testing.assert_array_equal(value, wanted[key], err_msg=key)
            else:
                np.testing.assert_allclose(value, wanted[key], rtol=1e-10, atol=1e-12, err_msg=key)
        seen |= set(got)
        assert live == min(m * max(counts), pp - coords["pp"])     # micro-batches: 1F1B's
        assert beside == weights                                    # and one more version of the weights
    assert seen == set(wanted)


def test_late_gradients_are_others_than_those_in_time():
    """Else nothing would be shown above: of the first two batches both are of W(0), and then they part."""
    (first, together), (second, alone) = late([4], 2, "sgd"), late([1, 1, 1, 1], 2, "sgd")
    assert first[0] == second[0] and first[1] != second[1]
    assert any(np.abs(together[key] - alone[key]).max() > 1e-3 for key in together)


@pytest.mark.parametrize("count, m", [(4, 3), (3, 5)])
def test_no_more_is_sent_than_with_a_flush(count, m):
    for rank, (without, flushed) in enumerate(crews.call(CASES + "messages", 3, args=(count, m))):
        assert without == flushed
        assert without[0] == count * m * (1 if rank in (0, 2) else 2) + (rank < 2)      # and what an input looks like


@pytest.mark.parametrize("p, m, batches", [(2, 2, 3), (4, 4, 10), (4, 8, 5), (8, 8, 20)])
def test_ranks_wait_for_one_pipeline_to_fill_and_empty(p, m, batches):
    played = play(one_forward_one_backward(p, m * batches))
    assert played.bubble == pytest.approx((p - 1) / (batches * m + p - 1))
    assert list(played.held) == [min(m, p - rank) for rank in range(p)]


@pytest.mark.parametrize("what, said", [
    ("exact", "ValueError: PipeDream2BW doesn't go with exact mode"),
    ("zero", "ValueError: PipeDream2BW doesn't go with fully_shard"),
    ("tied", "ValueError: PipeDream2BW doesn't go with parameters that several stages have, as 0.bias:"),
    ("few", "ValueError: PipeDream2BW: 2 micro-batches on 3 ranks: more than two batches could be under way"),
    ("statistics", "MismatchError"),
    ("shapes", "ValueError: PipeDream2BW.train: inputs of float64[n, 2, 7] and float64[n, 7]: what stages send"),
    ("loss", "MismatchError"),
    ("rows", "MismatchError")])
def test_what_does_not_go_with_it_is_told_on_all_ranks(what, said):
    n = 3 if what == "few" else 2
    found = crews.call(CASES + "refused", n, args=(what,), env=threads(1))
    assert any(each.startswith(said) for each in found)
    assert all(each is not None and each.startswith((said, "MismatchError")) for each in found)
    if what == "loss":
        assert "PipeDream2BW.train: loss_sum=None, and the last stage's forward takes no" in found[-1]
    if what == "statistics":
        assert "PipeDream2BW.train(Pipeline: 1, a BatchNorm in training, is in a stage without a wrapper" in found[0]


def test_after_an_error_it_asks_to_begin_anew():
    for said in crews.call(CASES + "broken", 1):
        assert said[0] == "" and said[1].startswith("an earlier train() of this pipeline has raised")


def test_calls_in_other_precisions():
    for kept, anew in crews.call(CASES + "mixed", 2):
        assert kept[0] == anew[0] and len(set(kept[0])) == 4
        assert all((kept[1][name] == value).all() for name, value in anew[1].items())


def test_what_is_thawed_between_two_calls():
    for kept, anew in crews.call(CASES + "thawed", 2):
        assert kept and all((kept[name] == value).all() for name, value in anew.items())


def test_no_batches_change_nothing():
    assert crews.call(CASES + "empty", 2) == [([], True)] * 2
