"""A model that is cut by layers is the whole model: against one process's training, to the last bit in exact mode."""

import itertools

import numpy as np
import pytest

from minitorch_dist import comm, nn
from minitorch_dist.parallel.pipelines import Pipeline, balanced, cut_sequential
from minitorch_dist.parallel.pipelines.schedule_blocks import BLOCKS
from minitorch_dist.parallel.pipelines.schedules import NAMES, one_forward_one_backward, play, schedule_of, zb_h1
from minitorch_dist.testing import ranks
from tests.crews import crews, threads

CASES = "tests.parallel.pipeline_cases:"


@pytest.fixture(scope="module")
def one_process():
    """{kind: (losses, parameters and buffers, digest)} of the whole model: float64 as it comes, float32 in exact mode,
    and float64 with BatchNorm in exact mode."""
    return crews.call(CASES + "wholes", 1, env=threads(1))[0]


@pytest.mark.parametrize("name, n, pp, m, chunks, wrapped", [
    ("gpipe", 2, 2, 3, 1, False), ("1f1b", 2, 2, 4, 1, True), ("1f1b", 3, 3, 5, 1, False), ("1f1b", 4, 2, 4, 1, True),
    ("interleaved", 2, 2, 4, 2, True), ("interleaved", 1, 1, 2, 3, False), ("zb-h1", 3, 3, 5, 1, False),
    ("zb-h1", 4, 2, 4, 1, True), ("zb-h1", 2, 2, 1, 1, False), ("zb-v", 2, 2, 5, 2, False),
    ("v-half", 4, 4, 6, 2, False), ("v-min", 3, 3, 7, 2, True), ("dualpipev", 2, 2, 5, 2, True),
    ("dualpipev", 4, 4, 9, 2, False), ("dualpipev", 1, 1, 3, 2, False)])
def test_one_curve_on_any_pipeline(one_process, name, n, pp, m, chunks, wrapped):
    """Adam, dropout, float64, batches of 13 that no m divides: the parameters of one process within 1e-10."""
    losses, wanted, _ = one_process["f8"]
    seen = set()
    arguments = name, pp, m, chunks, "f8", 13, False, wrapped
    for got_losses, got, live, coords in crews.call(CASES + "train", n, args=arguments):
        np.testing.assert_allclose(got_losses, losses, rtol=1e-10)
        for key, value in got.items():
            np.testing.assert_allclose(value, wanted[key], rtol=1e-10, atol=1e-10, err_msg=key)
        seen |= set(got)
        played = play(schedule_of(name, pp, m, chunks))
        assert live == (played.live[coords["pp"]], played.waiting[coords["pp"]])
    assert seen == set(wanted)


@pytest.mark.parametrize("name, n, pp, chunks", [("1f1b", 2, 2, 1), ("gpipe", 4, 4, 1), ("1f1b", 4, 2, 1),
                                                 ("interleaved", 2, 2, 2), ("zb-h1", 2, 2, 1), ("zb-h1", 4, 4, 1),
                                                 ("zb-h1", 4, 2, 1), ("zb-h2", 4, 4, 1),
                                                 ("zb-v", 2, 2, 2), ("zb-v", 4, 4, 2), ("v-half", 4, 4, 2),
                                                 ("v-min", 4, 4, 2), ("v-min", 4, 2, 2), ("dualpipev", 4, 4, 2),
                                                 ("dualpipev", 4, 2, 2)])
def test_exact_mode_has_one_set_of_bits(one_process, name, n, pp, chunks):
    """Float32, whose micro-batches are exact mode's micro-shards."""
    losses, wanted, _ = one_process["f4"]
    m = 8 * pp // n
    for got_losses, got, *_ in crews.call(CASES + "train", n, args=(name, pp, m, chunks, "f4", 16, True)):
        assert got_losses == losses
        for key, value in got.items():
            np.testing.assert_array_equal(value, wanted[key], err_msg=key)


@pytest.mark.parametrize("name, n", [("gpipe", 2), ("1f1b", 4), ("zb-h1", 4), ("zb-v", 4)])
def test_batch_norms_statistics_too(one_process, name, n):
    """In float64, which shows the order of their sums: micro-shards run forward before others run backward."""
    losses, wanted, _ = one_process["norms"]
    arguments = name, 2, 16 // n, 2 if name == "zb-v" else 1, "f8", 16, True, True, True
    for got_losses, got, *_ in crews.call(CASES + "train", n, args=arguments):
        assert got_losses == losses and any("running" in key for key in got)
        for key, value in got.items():
            np.testing.assert_array_equal(value, wanted[key], err_msg=key)


def test_batch_norms_of_a_frozen_stage_have_all_ranks_statistics_or_are_refused():
    for found in filter(None, crews.call(CASES + "frozen_norm", 4, ("wrapped",))):
        for got, wanted in zip(*found, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-12)
    for how, exact, words in (("unwrapped", False, "1, a BatchNorm in training, is in a stage without a wrapper"),
                              ("unwrapped", True, "1, a BatchNorm in training, is in a stage with nothing to train"),
                              ("wrapped", True, "1, a BatchNorm in training, is in a stage with nothing to train")):
        for said, _ in filter(None, crews.call(CASES + "frozen_norm", 4, (how, exact))):
            assert words in said
    for exact in (False, True):
        for (mean, var), _ in filter(None, crews.call(CASES + "frozen_norm", 4, ("eval", exact))):
            assert not mean.any() and (var == 1).all()


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("calls", [0, 1, 3])
@pytest.mark.parametrize("place, exact", [(0, False), (1, False), (1, True)])
def test_a_stage_that_uses_its_parameters_at_times(name, calls, place, exact):
    """The ranks that hold the same have the same gradients, though the last micro-batch brings none."""
    found = crews.call(CASES + "sometimes", 4, args=(name, calls, place, exact))
    for stage in (0, 1):
        first, second = (grads for pp, grads in found if pp == stage)
        for a, b in zip(first, second, strict=True):
            assert (a is None) == (b is None) == (stage == place and calls == 0)
            if a is not None:
                np.testing.assert_array_equal(a, b)


def test_ranks_may_take_micro_batches_in_orders_of_their_own():
    assert max(crews.call(CASES + "other_order", 2)) < 1e-12


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_batches_of_other_shapes(name):
    for found in crews.call(CASES + "other_shapes", 2, (name,)):
        for got, wanted in found:
            assert got == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("n, wrapped", [(2, False), (4, True)])
def test_backward_in_two_parts_does_nothing_twice(n, wrapped):
    """A tied weight, a checkpointed part with dropout and micro-batches that add up: the bits of 1F1B, as many products
    of matrices, and the gradients travel once, when the last W completes them."""
    m = 5
    for rank, found in enumerate(crews.call(CASES + "both", n, args=(m, wrapped))):
        whole, halves = found["1f1b"], found["zb-h1"]
        assert halves[0] == whole[0] and halves[1].keys() == whole[1].keys()
        for key, grad in halves[1].items():
            np.testing.assert_array_equal(grad, whole[1][key], err_msg=key)
        assert halves[2:4] == whole[2:4] and halves[3] == (2 * m if rank % 2 == 0 else 0)
        for steps, schedule in ((whole[4], one_forward_one_backward(2, m)), (halves[4], zb_h1(2, m))):
            assert steps == [NAMES[step.kind] for step in schedule[rank % 2]]
        assert halves[6] == whole[6] == 0 and (halves[5] == whole[5] if rank % 2 == 0 else halves[5] > whole[5])
        assert halves[7:] == whole[7:] == (int(wrapped), True)


def test_stages_without_parameters():
    for rank, (off, wanted, got) in enumerate(crews.call(CASES + "bare_ends", 3)):
        assert abs(off) < 1e-12 and set(got) == (set(wanted) if rank == 1 else set())
        for name, grad in got.items():
            np.testing.assert_allclose(grad, wanted[name], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name, n, chunks, frozen", [
    ("1f1b", 2, 1, 0), ("1f1b", 3, 1, 0), ("interleaved", 2, 2, 0), ("zb-v", 1, 2, 0), ("zb-v", 2, 2, 0),
    ("v-half", 3, 2, 0), ("v-min", 4, 2, 0), ("1f1b", 3, 1, 1), ("1f1b", 2, 1, 2), ("zb-h1", 3, 1, 2),
    ("interleaved", 2, 2, 2), ("zb-v", 2, 2, 1)])
def test_what_a_step_sends(name, n, chunks, frozen):
    """Over each boundary between ranks the activations of 13 samples, and their gradients back, in 4 messages each;
    where a V turns nothing, and no gradients to stages below all that is trained."""
    owners = list(range(n)) + list(range(n))[::-1 if name in BLOCKS else 1] * (chunks - 1)
    for rank, (sent, widths, same) in enumerate(crews.call(CASES + "counted", n, args=(name, chunks, frozen))):
        assert len(widths) == len(owners) - 1 and same
        away = [w for stage, w in enumerate(widths) if owners[stage] != owners[stage + 1]
                for sender in (owners[stage], *owners[stage + 1:stage + 2] * (stage >= frozen)) if sender == rank]
        assert sent.get("send", (0, 0)) == (4 * len(away), 13 * 8 * sum(away))
        assert set(sent) <= {"send", "recv", "broadcast"} and sent["broadcast"][0] == 1


def test_stages_are_the_best_cut():
    rng = np.random.default_rng(0)
    for n, parts in ((1, 1), (5, 2), (7, 3), (6, 6), (8, 4)):
        costs = rng.integers(1, 20, n)
        bounds = balanced(costs, parts)
        assert len(bounds) == parts + 1 and (bounds[0], bounds[-1]) == (0, n) and all(np.diff(bounds) > 0)
        greatest = max(costs[a:b].sum() for a, b in itertools.pairwise(bounds))
        best = min(max(costs[a:b].sum() for a, b in itertools.pairwise([0, *inner, n]))
                   for inner in itertools.combinations(range(1, n), parts - 1))
        assert greatest == best
    model = nn.Sequential(nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 2), nn.Tanh(), nn.Linear(2, 2))
    stages = cut_sequential(model, 2)
    assert [list(stage._modules) for stage in stages] == [["0"], ["1", "2", "3", "4"]]
    assert [list(s._modules) for s in cut_sequential(model, 2, [1, 1, 1, 1, 9])] == [["0", "1", "2", "3"], ["4"]]


def test_after_a_run_that_has_raised_there_is_no_other():
    """Its messages would be taken for the next batch's."""
    for first, second, third in ranks.call(CASES + "broken", 2):      # a world of its own: the messages stay in it
        assert (first, second) == ("nothing", "MemoryError: ")
        assert third.startswith("RuntimeError: an earlier run() of this pipeline has raised")


def test_errors_say_what_to_do():
    expected = {
        "ranks": ("ValueError", "a schedule for 3 ranks whose stages are [[0], [1], [2]], on 2 ranks"),
        "chunks": ("ValueError", "2 ranks whose stages are [[0, 2], [1, 3]], on 2 ranks, which have 1, 1 chunks"),
        "count": ("ValueError", "stages are [[0], [1]], on 2 ranks, which have 1, 2 chunks"),
        "deadlock": ("ValueError", "wait for each other"), "few": ("ValueError", "1 layers can't be cut into 2"),
        "W before I": ("ValueError", "rank 0 before W0 of stage 0"),
        "order": ("ValueError", "exact mode adds", "on rank 1 of this schedule", "5, 7, 6: sort these"),
        "kind": ("TypeError", "got a Linear"), "costs": ("ValueError", "2 costs for 10 layers"),
        "shards": ("ValueError", "4 micro-batches, and this rank's batch comes in 8"),
        "others": ("ValueError", "rank 0: 2 ranks, 2 stages, 4 micro-batches",
                   "rank 1: 2 ranks, 2 stages, 2 micro-batches"),
        "other steps": ("ValueError", "rank 0: row 0, step 2: F2 of stage 0", "rank 1: row 0, step 2: B0 of stage 0"),
        "samples": ("ValueError", "the first axis must be the samples"),
        "thawed": ("MismatchError", "stage 0 has something to train", "gradients end at stage 1"),
    }
    for rank, found in enumerate(crews.call(CASES + "errors", 2)):
        assert set(found) == set(expected) - ({"samples"} if rank else set())
        for name, (kind, *words) in expected.items():
            if name in found:
                assert found[name] is not None, f"{name}: accepted"
                assert found[name][0] == kind and all(word in found[name][1] for word in words), found[name]


@pytest.mark.parametrize("schedule, words", [
    ("zb-v", "schedule='zb-v': a schedule is a list .* schedule_of('zb-v', "),
    (4, "schedule=4: a schedule is .* schedule_of('1f1b', comm.size"),
    ([["F0"]], "is a list of Steps for each rank"), (one_forward_one_backward(1, 2)[0], "is a list of Steps for each")])
def test_what_is_no_schedule_is_told(schedule, words):
    with pytest.raises(TypeError, match=words.replace("(", r"\(")):
        Pipeline([nn.Linear(2, 2)], comm.world(), schedule)
    Pipeline([nn.Linear(2, 2)], comm.world(), schedule_of("1f1b", 1, 2))
