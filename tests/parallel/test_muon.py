"""Muon on several ranks; that its curve is one process's, and in exact mode its bits: test_fully_sharded."""

import math
import mmap

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import comm, optim
from minitorch_dist.optim.matrices import owners
from minitorch_dist.parallel.offload import offload, offload_optimizer
from minitorch_dist.parallel.tensor.parts import Part
from minitorch_dist.testing import ranks
from tests.crews import crews
from tests.device.fake_cupy import installed

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


def test_parts_that_do_not_say_who_has_the_others_are_refused():
    for said in crews.call(CASES + "refused", 2):
        for name in "annotated", "copied":
            assert said[name].startswith("Muon: a parameter of shape (4, 6) is a part of one of shape (8, 6)")
        assert said["tensor parallel"] is said["both"] is said["experts"] is None


@pytest.mark.parametrize(("sizes", "stage"), [
    ({"tp": 2, "dp": 1}, None), ({"tp": 3, "dp": 1}, None), ({"tp": 2, "dp": 2}, None),
    ({"tp": 2, "dp": 2}, 1), ({"dp": 2, "tp": 2}, 3)])
def test_parts_take_the_steps_of_whole_matrices(sizes, stage):
    alone = cases.net()
    its = cases.optimizer_of(alone)
    cases.fit(alone, its, range(3))
    its.step()
    cases.fit(alone, its, range(3, 4))
    seen = crews.call(CASES + "of_parts", sizes["tp"] * sizes["dp"], (sizes, stage))
    for state, calls, sent, at in seen:
        for name, value in alone.state_dict().items() if state else ():
            np.testing.assert_allclose(state[name], value, rtol=0, atol=1e-10)
        counts = sizes["tp"] > 1, sizes["dp"] > 1 and stage is not None
        assert calls == {axis: 2 for axis, there in zip(("tp", "dp"), counts, strict=True) if there}
        assert sent.get("tp", 0) == bytes_over_tp(sizes, stage, at)
    assert sum(bool(state) for state, *_ in seen) == sizes["tp"] * (sizes["dp"] if stage is None else 1)


def bytes_over_tp(sizes, stage, at):
    """There and back, of float64: (700, 7) and (5, 13) cut along rows, (13, 700) along columns. With fully_shard a row
    of ranks along tp owns a share of the matrices."""
    t, shapes = sizes["tp"], [(700, 7), (13, 700), (5, 13)]

    def has(k, rank):
        rows, columns = shapes[k]
        lo, hi = ((700, 700, 5)[k] * r // t for r in (rank, rank + 1))
        return (hi - lo) * (columns, rows, columns)[k]
    first = owners(shapes, sizes["dp"]) if stage is not None else [at["dp"]] * 3
    here = [k for k in range(3) if first[k] == at["dp"]]
    owner = dict(zip(here, owners([shapes[k] for k in here], t), strict=True))
    return 8 * sum(has(k, at["tp"]) if owner[k] != at["tp"] else math.prod(shapes[k]) - has(k, at["tp"]) for k in here)


def test_a_part_on_a_gpu_takes_the_hosts_step():
    """The stand-in's, of a matrix whose columns one rank has in another order."""
    value, grad = np.random.default_rng(2).standard_normal((2, 5, 7))
    order, found = np.random.default_rng(3).permutation(7), []
    with installed():
        for device, columns in (("cpu", None), ("cuda", order)):
            p, ct = (mt.tensor(a if columns is None else a[:, columns], device=device) for a in (value, grad))
            p.requires_grad_()
            if columns is not None:
                p.leaf.part_of, p.leaf.part = (5, 7), Part(comm.world(), 1, columns, 7)
            optimizer = optim.Muon([p], 0.1)
            p.grad = ct
            optimizer.step()
            found.append(p.cpu().numpy().copy())
    np.testing.assert_allclose(found[1], found[0][:, order], rtol=0, atol=1e-14)


def test_parts_that_lie_in_other_buckets_are_the_same_parameters():
    """Unequal parts fill DistributedDataParallel's buckets otherwise."""
    first, second = crews.call(CASES + "of_parts", 2, ({"tp": 2, "dp": 1}, None, 1e-4))
    whole, _ = crews.call(CASES + "of_parts", 2, ({"tp": 2, "dp": 1},))
    assert first[0].keys() == whole[0].keys()
    for name, value in whole[0].items():
        assert np.array_equal(first[0][name], value) and np.array_equal(second[0][name], value)


def test_ranks_with_other_parts_are_told_so():
    """(With gradients for others: as below.)"""
    for said in crews.call(CASES + "mixed_up", 2):
        assert "parts of different parameters: rank 0's is number 1 that was cut over them, of 700" in said["order"]
        assert "parts of different parameters: rank 0's is number" in said["model"]
        assert "parts of 6 rows or columns, but number 3 is on 2 of them" in said["overlap"]


@pytest.mark.parametrize("how", ["gradients", "one has none", "others", "order"])
def test_ranks_that_disagree_are_told_so(how):
    """On all of them, and at once."""
    for ended in ranks.call(CASES + "disagreeing", 2, (how,)):
        assert ended == "MismatchError"


def test_state_in_files_of_ranks_that_have_no_part(tmp_path):
    """Of two matrices in one unit, one rank may have nothing."""
    assert all(crews.call(CASES + "offloaded", 2, (str(tmp_path),)))
