"""Data parallelism: on any number of ranks the parameters are those of the 1-process run, and of plain NumPy."""

import numpy as np
import pytest

from minitorch_dist import data
from tests.crews import crews

from . import cases, plain

CASES = "tests.parallel.cases:"
EVERY_N = pytest.mark.parametrize("n", [1, 2, 3, 4])


def close(got, wanted, tolerance):
    for g, w in zip(got, wanted, strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=tolerance)


def closed_form(rows, count):
    x, labels = plain.dataset()
    return plain.loss_and_gradient(plain.initial(), x[list(rows)], labels[list(rows)], count)


def test_the_closed_form_is_that_of_central_differences():
    x, labels = plain.dataset()
    params = plain.initial()
    _, grads = plain.loss_and_gradient(params, x[:13], labels[:13], 13)
    random = np.random.default_rng(0)
    for p, g in zip(params, grads, strict=True):
        direction = random.standard_normal(p.shape)
        p += 1e-6 * direction
        up, _ = plain.loss_and_gradient(params, x[:13], labels[:13], 13)
        p -= 2e-6 * direction
        down, _ = plain.loss_and_gradient(params, x[:13], labels[:13], 13)
        p += 1e-6 * direction
        assert abs((up - down) / 2e-6 - (g * direction).sum()) < 1e-8


# ---------------------------------------------------------------- one curve

@pytest.fixture(scope="module")
def one_process():
    """Every curve by one process, without the wrapper."""
    return {name: cases.curve(name) for name in cases.CURVES}


@EVERY_N
def test_parameters_after_100_steps_are_those_of_one_process(n, one_process):
    everyone = crews.call(CASES + "curves", n)
    for name, (losses, _, wanted) in one_process.items():
        dtype = cases.CURVES[name][0]
        tolerance = 1e-10 if dtype == "f8" else 1e-5
        for rank, of_rank in enumerate(everyone):
            got_losses, digests, got = of_rank[name]
            assert len(digests) == cases.STEPS and digests == everyone[0][name][1], f"{name}: rank {rank} differs"
            np.testing.assert_allclose(got_losses, losses, rtol=0, atol=tolerance, err_msg=name)
            assert list(got) == list(wanted)
            for p in wanted:
                assert got[p].dtype == dtype
                np.testing.assert_allclose(got[p], wanted[p], rtol=0, atol=tolerance, err_msg=f"{name}: {p}")


def test_the_curves_can_tell_runs_apart(one_process):
    """Their losses fall, the last batch is uneven, and dropout and clipping have their effect."""
    assert plain.SAMPLES % cases.BATCH and all(plain.SAMPLES % cases.BATCH % n for n in (2, 3, 4))
    for name, (losses, digests, _) in one_process.items():
        assert np.mean(losses[-10:]) < 0.9 * np.mean(losses[:5]), name
        assert len(set(digests)) == cases.STEPS
    assert len({digests[-1] for _, digests, _ in one_process.values()}) == len(one_process)


@EVERY_N
def test_the_library_trains_like_plain_numpy(n):
    sampler = data.Sampler(plain.SAMPLES, cases.BATCH, seed=3)
    batches = [rows for epoch in range(20) for rows in sampler.epoch(epoch)]
    assert len(batches) == cases.STEPS
    losses, params = plain.train(batches, lr=0.05, momentum=0.9, clip=0.5)
    for got_losses, got in crews.call(CASES + "plain_sgd", n):
        close(got_losses, losses, 1e-10)
        close(got.values(), params, 1e-10)


# ---------------------------------------------------------------- gradients and calls

@EVERY_N
def test_gradients_and_what_they_cost(n):
    everyone = crews.call(CASES + "gradient_cases", n)
    _, of_13 = closed_form(range(13), 13)
    _, of_all = closed_form(range(53), 53)
    for seen in everyone:
        close(seen["summed", "outside the window"], of_13, 1e-15)
        for name in ("one bucket", "a bucket each"):
            close(seen["summed", name], of_13, 1e-15)
            close(seen["and then", name], of_13, 1e-15)
            assert "zero_grad" in seen["summed twice", name] and "no_sync" in seen["summed twice", name]
        assert seen["calls inside no_sync"] == 0
        assert seen["calls after no_sync"] == 4         # four parameters, a bucket each: one set of all-reduces
        close(seen["accumulated"], of_all, 1e-15)
        assert seen["still off"] and seen["on again"]
        close(seen["after an exception"], of_13, 1e-15)
        # The backward broke off in the hook of the last parameter but one, after two buckets had been posted.
        assert seen["broken off", False][2:] == seen["broken off", True][2:] == [True, True]
        assert "all-reduce" in seen["stale"]
        got, calls = seen["after breaking off"]
        close(got, of_13, 1e-15)
        assert calls == 4
    for name, count in (("one bucket", 1), ("a bucket each", 4), ("outside the window", 4)):
        traffic = [seen["traffic", name] for seen in everyone]
        for buckets_made, calls, _, size, everything in traffic:
            # The first backward with several buckets broadcasts the order in which gradients came.
            assert buckets_made == calls == count
            assert set(everything) == {("world", "all_reduce")} | ({("world", "broadcast")} if count > 1 else set())
            assert size == count * 4096 * 8
        size = traffic[0][3]
        assert sum(sent for _, _, sent, _, _ in traffic) == 2 * (n - 1) * size
        if 4096 % n == 0:
            assert all(sent == 2 * (n - 1) * size // n for _, _, sent, _, _ in traffic)


@EVERY_N
def test_buckets_are_posted_in_order_while_backward_still_runs(n):
    everyone = crews.call(CASES + "bucket_order", n)
    for events, lists, _, after, names in everyone:
        assert names == [f"{i}.{kind}" for i in range(4) for kind in ("weight", "bias")]
        assert lists == [[name] for name in reversed(names)]
        assert [detail for kind, detail in events if kind == "post"] == [f"bucket {i}" for i in range(8)]
        at = {detail: place for place, (_, detail) in enumerate(events)}
        for k in range(8):
            assert at[lists[k][0]] < at[f"bucket {k}"], "a bucket was posted before its gradient was complete"
        for layer in range(3):      # buckets 2·layer and 2·layer + 1 hold a layer; the next one's gradients come later
            posted = max(at[f"bucket {2 * layer}"], at[f"bucket {2 * layer + 1}"])
            assert posted < min(at[lists[2 * layer + 2][0]], at[lists[2 * layer + 3][0]])
        assert after == everyone[0][2], "the parameters after wrapping are not rank 0's"
    assert len({before for _, _, before, _, _ in everyone}) == n, "the ranks were to begin differently"
