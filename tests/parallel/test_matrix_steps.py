"""Dion2 and NorMuon on several ranks: rows are those of whole matrices, and the numbers that travel are counted."""

import math

import numpy as np
import pytest

from minitorch_dist.optim.matrices import owners
from minitorch_dist.testing import ranks
from tests.crews import crews, threads

from . import matrix_cases as cases
from . import moe_zero_cases, muon_cases
from .moe_zero_cases import Way

CASES = "tests.parallel.matrix_cases:"
each_kind = pytest.mark.parametrize("name", cases.KINDS)


@pytest.fixture(scope="module")
def alone():
    return {name: crews.call(CASES + "exact_curves", 1, (name, ["ddp"]), env=threads(1))[0]["ddp"]
            for name in cases.KINDS}


@each_kind
@pytest.mark.parametrize("n, ways", [(1, ["1", "3"]), (2, ["ddp", "3"]), (4, ["1", "2", "hybrid"])])
def test_one_set_of_bits(alone, name, n, ways):
    """Of parameters and state, in exact mode."""
    for rank, found in enumerate(crews.call(CASES + "exact_curves", n, (name, ways), env=threads(n))):
        for way, digest in found.items():
            assert digest == alone[name] or rank and way != "ddp", way


@each_kind
def test_a_checkpoint_goes_on_on_other_ranks_with_the_same_bits(tmp_path, name):
    path = str(tmp_path / "2")
    wanted = crews.call(CASES + "saved", 2, (path, "3", name), env=threads(2))[0]
    for n, way in (1, "ddp"), (2, "2"), (4, "3"):
        found = crews.call(CASES + "resumed", n, (path, way, name), env=threads(n))[0]
        assert found == [wanted] * (1 if way == "ddp" else 2), (n, way)


@each_kind
def test_the_same_gradients_give_the_same_bits_in_any_cut(name):
    """In float64, on three ranks too."""
    wanted = cases.of_given_gradients(name, [None])[None]
    for n in range(1, 5):
        first, *_ = crews.call(CASES + "of_given_gradients", n, (name, [None, 1, 3]))
        assert set(first.values()) == {wanted}, n


@each_kind
@pytest.mark.parametrize(("sizes", "stage"), [
    ({"tp": 2, "dp": 1}, None), ({"tp": 3, "dp": 1}, None), ({"tp": 2, "dp": 2}, 1), ({"dp": 2, "tp": 2}, 3)])
def test_parts_and_pieces_of_these_take_the_steps_of_whole_matrices(name, sizes, stage):
    whole = muon_cases.net()
    its = muon_cases.optimizer_of(whole, cases.KINDS[name])
    muon_cases.fit(whole, its, range(3))
    its.step()
    muon_cases.fit(whole, its, range(3, 4))
    seen = crews.call(CASES + "of_parts", sizes["tp"] * sizes["dp"], (name, sizes, stage))
    for state, calls, *_ in seen:
        for parameter, value in whole.state_dict().items() if state else ():
            np.testing.assert_allclose(state[parameter], value, rtol=0, atol=1e-10)
        assert calls == {axis: 2 for axis, there in (("tp", True), ("dp", stage is not None)) if there}
    assert sum(bool(state) for state, *_ in seen) == sizes["tp"] * (sizes["dp"] if stage is None else 1)


def chosen(m):
    """Which elements of a momentum a step is made of, by its definition."""
    axis = 0 if m.shape[0] <= m.shape[1] else 1
    sums = np.abs(m).sum(1 - axis)
    best = np.argsort(-sums)[:math.ceil(cases.SHARE * len(sums) - 1e-9)]
    return np.isin(np.arange(len(sums)), best).reshape((-1, 1) if axis == 0 else (1, -1)) & np.ones(m.shape, bool)


@each_kind
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_what_travels(n, stage, name):
    """To its owner and back what Dion2 chooses, counted against a choice that this process makes, and all with NorMuon;
    and 12 bytes per row: per row or column, of whichever there are fewer, in Dion2."""
    whole = muon_cases.net()
    its = muon_cases.optimizer_of(whole, cases.KINDS[name])
    muon_cases.fit(whole, its, range(1))
    masks = [chosen(state["momentum_buffer"] + p.grad.numpy()) if name == "dion2" else np.ones(p.shape, bool)
             for p, state in zip(its.optimizers[0].param_groups[0]["params"], its.state_dict()["state"], strict=False)]
    seen = crews.call(CASES + "counted", n, (name, stage))
    shapes, counts = zip(*seen[0][2], strict=True)
    assert [mask.shape for mask in masks] == list(shapes)
    owner = owners([(mask.any(1).sum(), mask.any(0).sum()) for mask in masks], n)
    ends = [np.cumsum([0, *each]) for each in counts]
    counts = [[mask.reshape(-1)[a:b].sum() for a, b in zip(end, end[1:], strict=False)]
              for mask, end in zip(masks, ends, strict=True)]
    reduced = 0
    for rank, (calls, sent, _) in enumerate(seen):
        out = sum(c[rank] for c, o in zip(counts, owner, strict=True) if o != rank)
        back = sum(sum(c) - c[rank] for c, o in zip(counts, owner, strict=True) if o == rank)
        assert calls["all_to_all"] == 2 and sent.get("all_to_all", 0) == 8 * (out + back)
        reduced += sent.get("all_reduce", 0)
    assert reduced == 2 * (n - 1) * 12 * sum(min(shape) if name == "dion2" else shape[0] for shape in shapes)
    if name == "dion2":
        assert sum(map(sum, counts)) == 700 * 3 + 4 * 700 + 2 * 13        # of (700, 7), (13, 700) and (5, 13)


@each_kind
def test_divided_experts(name):
    """Stacks of which a rank has whole matrices, pieces of them, or parts: one process's parameters and losses."""
    ways = [Way(2, 3, optimizer=name), Way(4, 1, optimizer=name), Way(1, 2, optimizer=name), Way(2, 0, optimizer=name)]
    it = moe_zero_cases.Training(Way(1, 0, optimizer=name)).run(3)
    wanted = {parameter: array for parameter, _, array in it.pieces()}
    for seen in crews.call(CASES + "of_experts", 4, (ways, 3)):
        for way, (losses, _, pieces, _) in zip(ways, seen, strict=True):
            np.testing.assert_allclose(losses, it.losses, rtol=1e-10, err_msg=f"{way}")
            for parameter, box, values in pieces:
                np.testing.assert_allclose(values, wanted[parameter][tuple(slice(*side) for side in box)], rtol=0,
                                           atol=1e-9)


@each_kind
@pytest.mark.parametrize("how", ["gradients", "one has none", "others", "order"])
def test_ranks_that_disagree_are_told_so(how, name):
    """On all of them, and at once."""
    for ended in ranks.call(CASES + "disagreeing", 2, (name, how)):
        assert ended == "MismatchError"
