"""Muon on several ranks; that its curve is one process's, and in exact mode its bits: test_fully_sharded."""

import mmap

import numpy as np
import pytest

from minitorch_dist.optim.muon import owners
from minitorch_dist.parallel import offload
from minitorch_dist.parallel.offload import offload_optimizer
from minitorch_dist.testing import ranks
from tests.crews import crews

from . import muon_cases as cases

CASES = "tests.parallel.muon_cases:"


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_each_element_travels_to_its_owner_and_back(n, stage):
    seen = crews.call(CASES + "counted", n, (stage,))
    shapes, counts = zip(*seen[0][2], strict=True)
    owner = owners(shapes, n)
    assert all(sum(c) == np.prod(shape) for shape, c in zip(shapes, counts, strict=True))
    assert n == 1 or len(set(owner)) == n and any(np.count_nonzero(c) > 1 for c in counts)   # shared, and cut
    for rank, (calls, sent, cuts) in enumerate(seen):
        assert cuts == seen[0][2] and calls["all_to_all"] == 2
        out = sum(c[rank] for c, o in zip(counts, owner, strict=True) if o != rank)
        back = sum(sum(c) - c[rank] for c, o in zip(counts, owner, strict=True) if o == rank)
        assert sent.get("all_to_all", 0) == 8 * (out + back)


def test_every_matrix_is_made_once_and_each_gets_its_part():
    seen = crews.call(CASES + "together", 3)
    assert sorted(k for made, _ in seen for k in made) == [0, 1, 2, 3] and all(right for _, right in seen)


@pytest.mark.parametrize("way", ["full state", "checkpoint"])
def test_a_restored_run_continues_bit_for_bit(tmp_path, way):
    """In another stage, whose pieces are others'."""
    on, again, optimizer = crews.call(CASES + "restored", 2, (str(tmp_path), way))[0]
    assert all(on[name].tobytes() == again[name].tobytes() for name in on)
    alone = cases.net()
    its = cases.optimizer_of(alone)
    cases.fit(alone, its, range(6))
    for name, value in alone.state_dict().items():
        np.testing.assert_allclose(on[name], value, rtol=1e-10, atol=1e-12)
    if optimizer:
        alone = cases.net()
        its = cases.optimizer_of(alone)
        cases.fit(alone, its, range(3))
        for got, wanted in zip(optimizer["state"], its.state_dict()["state"], strict=True):
            assert list(got) == list(wanted)
            for name in wanted:
                np.testing.assert_allclose(got[name], wanted[name], rtol=1e-9, atol=1e-12)


def test_state_in_files_has_the_same_bits(tmp_path):
    found = []
    for away in (False, True):
        model = cases.net()
        optimizer = cases.optimizer_of(model)
        cases.fit(model, optimizer, range(1))
        if away:
            offload_optimizer(optimizer, tmp_path)
        cases.fit(model, optimizer, range(1, 4))
        state = optimizer.state_dict()
        found.append((state["steps"], [a.tobytes() for arrays in (model.state_dict(), *state["state"])
                                       for a in arrays.values()]))
    assert found[0] == found[1] and not list(tmp_path.iterdir())
    arrays = [a for arrays in optimizer.state for a in arrays.values()]
    assert len(arrays) == 3 and all(isinstance(offload.owner_of(a).base, mmap.mmap | memoryview) for a in arrays)


def test_parts_of_matrices_are_refused_and_experts_are_not():
    for said in crews.call(CASES + "refused", 2):
        assert said["tensor parallel"].startswith("Muon: a parameter of shape (4, 6) is a part of one of shape (8, 6)")
        assert said["annotated"].startswith("Muon: a parameter of shape (4, 6) is a part of one of shape (8, 6)")
        assert said["both"] == said["tensor parallel"] and said["experts"] is None


@pytest.mark.parametrize("how", ["gradients", "one has none", "others", "order"])
def test_ranks_that_disagree_are_told_so(how):
    """On all of them, and at once."""
    for ended in ranks.call(CASES + "disagreeing", 2, (how,)):
        assert ended == "MismatchError"


def test_state_in_files_of_ranks_that_have_no_part(tmp_path):
    """Of two matrices in one unit, one rank may have nothing."""
    assert all(crews.call(CASES + "offloaded", 2, (str(tmp_path),)))
