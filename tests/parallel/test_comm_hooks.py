"""Communication hooks: what they sum, to which precision, and what they send."""

import gc

import numpy as np
import pytest

from minitorch_dist.parallel.comm_hooks import TopK
from tests.crews import crews

from . import hook_cases
from .hook_cases import SHAPES

CASES = "tests.parallel.hook_cases:"
PADDED = 4096       # elements of the one bucket: its tensors, the counts and padding


def sums(kind, n, step=0):
    """float64 sums of all ranks' gradients."""
    everyone = [hook_cases.hook_cotangents(kind, rank, step) for rank in range(n)]
    return {name: sum(cts[name].astype(np.float64) for cts in everyone) for name in SHAPES}


def relative(got, wanted):
    return np.linalg.norm(got - wanted) / np.linalg.norm(wanted)


@pytest.fixture(scope="module", params=[2, 3, 4])
def results(request):
    return request.param, crews.call(CASES + "comm_hooks", request.param)


def test_all_ranks_hold_the_same_bits(results):
    _, everyone = results
    for name, (steps, _, _) in everyone[0].items():
        for seen in everyone[1:]:
            for ours, theirs in zip(steps, seen[name][0], strict=True):
                assert all((ours[k].view(np.uint32) == theirs[k].view(np.uint32)).all() for k in SHAPES), name


def test_fp16_rounds_twice_and_adds_up_in_float32(results):
    n, everyone = results
    (got,), _, calls = everyone[0]["fp16"]
    for name in SHAPES:
        rounded = sum(hook_cases.hook_cotangents("full", rank)[name].astype(np.float16).astype(np.float64)
                      for rank in range(n)).astype(np.float16)
        assert relative(got[name], rounded.astype(np.float64)) < 1e-4       # one unit here and there, of the second
        assert 1e-5 < relative(got[name], sums("full", n)[name]) < 2e-3     # it is compressed
    assert {op for _, op in calls} == {"all_to_all", "all_gather"}
    # Half the bytes of the plain all-reduce (all ranks together), but for the padding to a multiple of the ranks.
    padded = -(-PADDED // n) * n
    assert all(sum(seen["fp16"][1].values()) == 2 * (n - 1) * 2 * padded // n for seen in everyone)
    assert sum(seen["none"][1]["all_reduce"] for seen in everyone) == 2 * (n - 1) * 4 * PADDED


def test_fp16_overflow_is_seen(results):
    _, everyone = results
    (got,), _, _ = everyone[0]["fp16 overflow"]
    assert all(np.isinf(got[name]).any() for name in ("a", "d"))


def test_power_sgd_is_exact_where_the_sum_has_its_rank(results):
    n, everyone = results
    (got,), sent, calls = everyone[0]["power, thin"]
    wanted = sums("thin", n)
    for name in SHAPES:
        assert relative(got[name], wanted[name]) < 1e-5, name
    # P and Q of the two large matrices, of rank 2; all else as it is. The sum over ranks is that of rings.
    thin = sum(2 * (SHAPES[k][0] + int(np.prod(SHAPES[k][1:]))) for k in ("a", "d"))
    plain = PADDED - sum(int(np.prod(SHAPES[k])) for k in ("a", "d"))
    total = sum(seen["power, thin"][1]["all_reduce"] for seen in everyone)
    assert total == 2 * (n - 1) * 4 * (thin + plain)
    assert calls["world", "all_reduce"] == 3 and set(sent) == {"all_reduce"}


def test_power_sgd_makes_up_for_what_it_left_out(results):
    """Of a constant gradient of full rank each step sends a part only, but the sum of the steps grows as it should."""
    n, everyone = results
    steps, _, _ = everyone[0]["power, constant"]
    wanted = sums("full", n)
    for name in ("a", "d"):
        assert relative(steps[0][name], wanted[name]) > 0.5
        mean = sum(step[name].astype(np.float64) for step in steps) / len(steps)
        first_half = sum(step[name].astype(np.float64) for step in steps[:20]) / 20
        assert relative(mean, wanted[name]) < 0.6 * relative(first_half, wanted[name]) + 0.02
    for step in steps:      # what isn't compressed is simply the sum
        assert relative(step["b"], wanted["b"]) < 1e-6 and relative(step["c"], wanted["c"]) < 1e-6


def one_bit(v):
    return np.where(v >= 0, 1, -1) * np.abs(v).mean()


def top(v):
    sent, largest = np.zeros_like(v), np.argsort(-np.abs(v), axis=None)[:-(-v.size // 10)]
    sent.flat[largest] = v.flat[largest]
    return sent


@pytest.mark.parametrize("name, send", [("one bit", one_bit), ("top", top)])
def test_what_is_left_out_is_added_to_the_next_gradient(results, name, send):
    """All steps, by the definition in float64, parameter by parameter."""
    n, everyone = results
    steps, sent, calls = everyone[0][name]
    left = [dict.fromkeys(SHAPES, 0.0) for _ in range(n)]
    for step, got in enumerate(steps):
        for k in SHAPES:
            total = 0.0
            for rank in range(n):
                v = hook_cases.hook_cotangents("full", rank, step)[k].astype(np.float64) + left[rank][k]
                left[rank][k] = v - send(v)
                total = total + send(v)
            assert relative(got[k], total) < 1e-5, (step, k)
    sizes = [int(np.prod(shape)) for shape in SHAPES.values()]
    if name == "one bit":
        message = -(-sum(sizes) // 8) + 4 * len(sizes)
    else:
        message = sum(-(-size // 10) for size in sizes) * 8
    assert sent["all_gather"] == (n - 1) * message and calls["world", "all_gather"] == 2
    # The counts of who has used what, and the padding to a whole bucket.
    assert sum(seen[name][1]["all_reduce"] for seen in everyone) < 2 * (n - 1) * 4 * (PADDED - sum(sizes))


@pytest.mark.parametrize("share", [0, -0.1, 1.01, np.nan])
def test_no_such_share(share):
    with pytest.raises(ValueError, match=f"TopK: share={share} must be above 0"):
        TopK(share)


def test_training_goes_on_much_the_same():
    runs = {hook: crews.call(CASES + "hooked_training", 2, (hook,)) for hook in (None, "fp16", *hook_cases.HOOKS)}
    assert all(everyone[0] == everyone[1] for everyone in runs.values())
    final = {hook: np.mean(run[0][0][-10:]) for hook, run in runs.items()}
    assert final[None] < 0.6 * runs[None][0][0][0]
    assert abs(final["fp16"] - final[None]) < 0.02
    for hook in hook_cases.HOOKS:
        assert final[hook] < 1.15 * final[None] + 0.05, hook


@pytest.mark.parametrize("name", hook_cases.HOOKS)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_nothing_is_lost_where_a_matrix_is_unused_or_zero(n, name):
    """What was handed out and what is still left out make up all gradients."""
    everyone = crews.call(CASES + "with_gaps", n, (name,))
    handed, left_out = everyone[0][0], sum(left for _, left, _ in everyone)
    true = sum(own for _, _, own in everyone)
    assert relative(handed + left_out, true) < 1e-4
    assert np.linalg.norm(handed) > 0.3 * np.linalg.norm(true)


@pytest.mark.parametrize("name", hook_cases.HOOKS)
def test_nothing_is_kept_of_a_step_that_is_skipped(name):
    with_it, without = (crews.call(CASES + "with_a_step_skipped", 2, (name, steps)) for steps in ([1, 2, 3], [1, 3]))
    for sums, wanted in zip(with_it, without, strict=True):
        assert len(sums) == len(wanted) == 2
        for name, gradient in wanted[1].items():
            np.testing.assert_array_equal(sums[1][name], gradient)


@pytest.mark.parametrize("name", hook_cases.HOOKS)
def test_nothing_is_kept_of_a_model_that_is_gone(name):
    """Whose parameters' ids another model's may have."""
    hook = hook_cases.HOOKS[name]()
    hook_cases.hooked(hook, lambda step: hook_cases.hook_cotangents("full", 0, step))
    gc.collect()
    assert not any(map(len, (hook.left_out, getattr(hook, "q", ()), getattr(hook, "steps", ()))))
