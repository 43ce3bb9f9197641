"""What DistributedDataParallel refuses, and what looks like misuse and must be right."""

import re

import numpy as np
import pytest

from minitorch_dist import comm, nn
from minitorch_dist.parallel import DistributedDataParallel, fully_shard
from minitorch_dist.testing import ranks
from tests.crews import crews

from . import misuse_cases

CASES = "tests.parallel.misuse_cases:"


def same(got, wanted, factors=None):
    assert list(got) == list(wanted)
    for name, gradient in wanted.items():
        np.testing.assert_allclose(got[name], gradient * (factors or {}).get(name, 1), rtol=0, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("n", [1, 2])
def test_a_step_in_exact_mode_that_is_left_half_way(n):
    for said, after, forgotten in crews.call(CASES + "half_a_step", n):
        assert "after 2 of the 4 backward passes" in said and "forget_step()" in said
        same(after, misuse_cases.alone(range(4 * n), 1))
        same(forgotten, misuse_cases.alone(range(4 * n), 2))


def test_one_rank_may_begin_a_step_anew():
    for grads in crews.call(CASES + "one_rank_gives_up", 2):
        same(grads, misuse_cases.alone(range(4)))


def test_models_that_change_are_wrapped_twice_or_copied():
    for said in crews.call(CASES + "exchanged", 2):
        for name, words in {"weight": "0 was changed.*weight is new", "layer": "the model was changed.*2 is new",
                            "more": "1 was changed.*scale is new", "bias": "2 was changed.*has weight left",
                            "again": "all of this model is one already", "inside": "0 of this model is one already",
                            "second wrapper": "0.weight, 0.bias.*belongs to one already.*units=list",
                            "deepcopy": "model.module", "pickle": "model.module",
                            "copy of the inside": "^nothing$"}.items():
            assert re.search(words, said[name]), (name, said[name])


@pytest.mark.parametrize("exact", [False, True])
def test_a_copy_of_the_module_knows_of_no_ranks(exact):
    (trained, grads), (nothing, _) = crews.call(CASES + "copies_of_the_inside", 2, (exact,))
    assert trained == [True, True] and nothing == [] and all(np.isfinite(g).all() for g in grads.values())


@pytest.mark.parametrize("n", [1, 2])
def test_hooks_that_replace_gradients(n):
    wanted = misuse_cases.alone(range(n))
    for found in crews.call(CASES + "hooks", n):
        for name in ("before wrapping", "after wrapping", "on the gradient"):
            same(found[name], wanted, {"2.weight": 2})
        assert "replaced .grad of a parameter of bucket" in found["of another"]
        assert "no_sync" in found["create_graph"]


@pytest.mark.parametrize("n", [1, 2])
def test_what_looks_odd_and_is_right(n):
    for found in crews.call(CASES + "the_usual", n):
        for name in ("backward twice", "evaluation between", "two models, one backward"):
            same(found[name], misuse_cases.alone(range(n)))
        same(found["the other"], misuse_cases.alone(range(10, 10 + n)))


@pytest.mark.parametrize(("case", "words"), [("one_rank_raises", "backward of another rank has raised"),
                                             ("two_models_in_another_order", "different pieces of the shared window")])
def test_what_must_end_the_job(case, words):
    with pytest.raises(AssertionError, match=words):
        ranks.call(CASES + case, 2, limit=20)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("exact", [False, True])
def test_what_a_step_given_up_has_used_counts_for_nothing(n, exact):
    unused = ["maybe.bias", "maybe.weight"]
    for without, said, used_once in crews.call(CASES + "used_in_a_step_given_up", n, (exact,)):
        assert without == [*unused, "table"] and said == unused and used_once == ["table"]


@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard])
def test_a_mesh_is_no_communicator(wrap):
    mesh = comm.DeviceMesh(dp=1)
    with pytest.raises(TypeError, match=r"comm is a DeviceMesh.*mesh\[\"dp\"\]"):
        wrap(nn.Linear(4, 3), mesh)
    wrap(nn.Linear(4, 3), mesh["dp"])
