"""Dion over gradients that nobody sums: the steps of one process, and rank · (rows + columns) numbers on the wire."""

import math
import re

import numpy as np
import pytest

from minitorch_dist import ledger
from minitorch_dist.optim.settings import share
from minitorch_dist.testing import ranks
from tests.crews import crews

from . import dion_cases as cases

CASES = "tests.parallel.dion_cases:"
STEPS = 6


def close(found, wanted, tolerance=1e-10):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=tolerance, err_msg=name)


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def results(request):
    return request.param, crews.call(CASES + "trained", request.param, (STEPS,))


def test_parameters_and_state_are_those_of_one_process(results):
    n, everyone = results
    model, optimizer = cases.begin()
    start = model.state_dict()
    cases.fit(model, optimizer, range(STEPS))
    values, states, steps = cases.state_of(model, optimizer)
    assert max(np.abs(values[name] - start[name]).max() for name in values) > 0.05
    for found, theirs, numbers, *_ in (seen[0] for seen in everyone):
        close(found, values)
        assert numbers == steps
        for each, wanted in zip(theirs, states, strict=True):
            close({name: a for name, a in each.items() if name != "q"},
                  {name: a for name, a in wanted.items() if name != "q"})
            if "q" in wanted:       # but for the directions of columns, which P may have turned round
                close({"q": each["q"] @ each["q"].swapaxes(-1, -2)}, {"q": wanted["q"] @ wanted["q"].swapaxes(-1, -2)})
        assert all((found[name] == everyone[0][0][0][name]).all() for name in found)       # one set of bits


def test_momenta_are_each_ranks_own(results):
    """And all of their sum is rank 0's where they have been saved."""
    n, everyone = results
    for k, whole in enumerate(state["momentum_buffer"].reshape(-1) for state in everyone[0][0][1][:3]):
        before, after = ([seen[0][at][k] for seen in everyone] for at in (3, 4))
        np.testing.assert_allclose(sum(before), whole, rtol=0, atol=1e-12)
        assert n == 1 or all(np.linalg.norm(own - whole) > 0.3 * np.linalg.norm(whole) for own in before)
        assert (after[0] == whole).all() and not any(own.any() for own in after[1:])


def test_a_parameter_that_some_rank_has_not_used_counts_as_zeros(results):
    """And one that nobody has used makes no step."""
    n, everyone = results
    values = everyone[0][1][0]
    for found, _, steps, *_ in (seen[1] for seen in everyone):
        assert steps[:3] == [STEPS, STEPS, STEPS - 2]
        assert all((found[name] == values[name]).all() for name in found)
    model, optimizer = cases.begin()
    for step in range(STEPS):
        x, ct = cases.batch(step)
        model.zero_grad()
        for rank in range(n):
            (model(cases.mt.tensor(x[rank::n]), bool(step % 3 and rank == 0)) * ct[rank::n]).sum().backward()
        optimizer.step()
    close(values, model.state_dict())


@pytest.mark.parametrize("n", [2, 3, 4])
def test_bytes(n):
    """A backward sends a count for each parameter, a step r numbers for each row and column."""
    numbers = sum(math.prod(p.shape[:-2]) * share(cases.SHARE, min(p.shape[-2:])) * sum(p.shape[-2:])
                  for p in cases.hidden(cases.Net()))
    (first, backward, step), (_, all_backward, all_step) = (
        list(zip(*crews.call(CASES + "counted", n, (unsummed,)), strict=True)) for unsummed in (True, False))
    assert first == step
    sent = [sum(bytes_.get("all_reduce", 0) for _, bytes_ in each) for each in (backward, step, all_backward, all_step)]
    assert {op for each in (*backward, *step, *all_backward, *all_step) for op in each[0]} == {"all_reduce"}
    unit = 2 * (n - 1) * 4      # of an all-reduce, all ranks together, per number
    assert sent[3] == 0 and sent[1] == unit * numbers and all(calls["all_reduce"] == 2 for calls, _ in step)
    # A bucket is padded to a multiple of 4,096; without the matrices, 4,061 numbers, three counts are left of theirs.
    assert sent[2] == unit * 2 * 4096 and sent[0] == unit * (4096 + 3) and numbers < 1100


def test_a_checkpoint_goes_on_on_other_ranks(tmp_path):
    """With the same number of them on the same bits."""
    (bits, wanted), *_ = crews.call(CASES + "saved", 2, (str(tmp_path),))
    for n in (1, 2, 3):
        (found, values), *rest = crews.call(CASES + "resumed", n, (str(tmp_path),))
        assert n != 2 or found == bits
        close(values, wanted)
        assert all(each == found for each, _ in rest)


def test_a_step_is_left_out_on_all_ranks_or_none():
    (values, factor, steps), *others = crews.call(CASES + "scaled", 3)
    assert factor == 2.0 ** 7 and steps == [2] * 6
    for theirs in others:
        assert theirs[1:] == (factor, steps) and all((theirs[0][name] == values[name]).all() for name in values)


def test_in_a_pipeline():
    """Whose stages have their own matrices alone, and draw the same numbers for them."""
    model = cases.layers()
    optimizer = cases.optimizer_of(model)
    for each in cases.batches(4):
        optimizer.zero_grad()
        shard, = each.shards
        (cases.loss_sum(model(shard.inputs), shard.labels) / 24).backward()
        optimizer.step()
    for found in crews.call(CASES + "in_a_pipeline", 2, (4,)):
        for p, value in zip(model.parameters(), found, strict=True):
            np.testing.assert_allclose(value, p.numpy(), rtol=0, atol=1e-12)


def test_beside_other_things():
    """Against one process with each step's samples."""
    seen = crews.call(CASES + "besides", 3)
    assert [failed for _, failed in seen] == ["ZeroDivisionError: "] * 3
    assert all((values[name] == seen[0][0][name]).all() for values, _ in seen for name in values)
    model, optimizer = cases.begin()
    for step in range(4):
        xs, cts = zip(*(cases.batch(10 * rank + step) for rank in range(3) if step < 2 + rank), strict=True)
        model.zero_grad()
        ((model(cases.mt.tensor(np.concatenate(xs))) * np.concatenate(cts)).sum() / (24 * len(xs))).backward()
        optimizer.step()
    cases.fit(model, optimizer, [6])
    close(seen[0][0], model.state_dict())


@pytest.mark.parametrize("n", [1, 2])
def test_what_is_refused(n):
    """On one rank gradients are whole."""
    for found in crews.call(CASES + "refused", n):
        assert "unsummed parameters in exact mode" in found["exact"]
        assert "1 of the unsummed parameters are none of the module" in found["stranger"]
        assert "is a piece, or a part, of a larger one" in found["pieces"]
        assert found["clip the others"] == found["step"] == "nothing"
        if n == 1:
            assert found["noise"] == "nothing"
            assert found["differ"] == found["AdamW"] == found["SGD made before"] == found["clip"] == "nothing"
            continue
        assert "GradientNoiseScale: 3 of the parameters are `unsummed`" in found["noise"]
        assert "different models" in found["differ"] and "unsummed=" in found["differ"]
        assert re.search(r"clip_grad_norm_: 3 of these parameters, of shape \(3, 31, 31\) say, are `unsummed`",
                         found["clip"])
        for who, said in ("AdamW", found["AdamW"]), ("SGD", found["SGD made before"]):
            assert re.search(who + r": a parameter of shape \(.* is `unsummed`: each of the 2 ranks has its own", said)


def test_ranks_that_disagree_are_told_so():
    assert ranks.call(CASES + "order", 2) == ["MismatchError"] * 2


def test_one_process_sends_nothing():
    model, optimizer = cases.begin()
    with ledger.record() as book:
        cases.fit(model, optimizer, range(2))
        optimizer.state_dict()
    assert not book.calls
