"""Adafactor of models that are cut: means and RMS are those of whole parameters, and what is sent is counted."""

import math

import numpy as np
import pytest

from minitorch_dist import checkpoints, optim
from minitorch_dist.flat import BLOCK, round_up
from minitorch_dist.testing import ranks
from tests.crews import crews, threads

from . import adafactor_cases as cases
from . import eight_bit_cases, moe_zero_cases
from .adafactor_cases import Cut
from .moe_zero_cases import Way

CASES = "tests.parallel.adafactor_cases:"
OPTIMIZERS = cases.OPTIMIZERS


@pytest.fixture(scope="module")
def alone():
    return crews.call(CASES + "exact_curves", 1, (["ddp"],), env=threads(1))[0]


@pytest.mark.parametrize("n, ways", [(1, ["1", "3"]), (2, ["ddp", "3"]), (4, ["1", "2", "hybrid"])])
def test_one_set_of_bits(alone, n, ways):
    """Of parameters and state, in exact mode."""
    for rank, found in enumerate(crews.call(CASES + "exact_curves", n, (ways,), env=threads(n))):
        for (name, way), digest in found.items():
            assert digest == alone[name, "ddp"] or rank and way != "ddp", (name, way)
    assert len(set(alone.values())) == len(OPTIMIZERS)


@pytest.mark.parametrize("name", ["adafactor", "combined"])
def test_a_checkpoint_goes_on_on_other_ranks_with_the_same_bits(tmp_path, name):
    path = str(tmp_path / "2")
    wanted = crews.call(CASES + "saved", 2, (path, "3", name), env=threads(2))[0]
    for n, way in (1, "ddp"), (1, "1"), (2, "2"), (4, "3"):
        found = crews.call(CASES + "resumed", n, (path, way, name), env=threads(n))[0]
        assert found == [wanted] * (1 if way == "ddp" else 2), (n, way)


# ---------------------------------------------------------------- parameters of all shapes

@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_one_curve_and_its_bytes(n):
    """In float64, with torch's settings; what a step sends, and a rank holds, by the shapes."""
    model = cases.Odd()
    optimizer = optim.Adafactor(model.parameters(), 0.05)
    cases.fit(model, optimizer, range(3))
    values, state = model.state_dict(), optimizer.state_dict()
    lines = sum(math.prod(p.shape[:-2]) * (p.shape[-2] + p.shape[-1]) for p in model.parameters() if p.ndim > 1)
    sent = dict.fromkeys([None, 1, 2, 3], 0)
    for rank, found in enumerate(crews.call(CASES + "curves", n, (list(sent),))):
        for way, (got, theirs, calls, bytes_sent, held, sizes) in found.items():
            for name, value in values.items() if rank == 0 or way is None else ():
                np.testing.assert_allclose(got[name], value, rtol=0, atol=1e-10, err_msg=f"{way} {name}")
            for here, there in zip(theirs["state"], state["state"], strict=True) if rank == 0 else ():
                assert list(here) == list(there)
                for name in there:
                    np.testing.assert_allclose(here[name], there[name], rtol=1e-9, err_msg=f"{way} {name}")
            assert held == 8 * (lines + sum(round_up(size, 16) for size in sizes)), way
            assert sum(calls.values()) == (4 if way else 0) and all(op == "all_reduce" for _, op in calls)
            sent[way] += sum(bytes_sent.values())
    assert sent.pop(None) == 0 and set(sent.values()) == {2 * (n - 1) * (12 * lines + 16 * squares(n))}


def test_the_same_gradients_give_the_same_bits_in_any_cut():
    """In float64, on three ranks too."""
    wanted = cases.of_given_gradients([None])[None]
    for n in range(1, 5):
        first, *_ = crews.call(CASES + "of_given_gradients", n, ([None, 1, 3],))
        assert set(first.values()) == {wanted}, n


def squares(n):
    """How many are all-reduced of n ranks' pieces: one per 4,096 elements of each parameter, and one per 16 of those
    blocks that two ranks have."""
    shapes = [p.shape for p in cases.Odd().parameters()]
    starts = np.cumsum([0, *(round_up(math.prod(shape), 16) for shape in shapes)])
    share = round_up(-(-int(starts[-1]) // n), BLOCK)
    count = 0
    for shape, start in zip(shapes, starts, strict=False):
        size = math.prod(shape)
        cuts = [rank * share - start for rank in range(1, n) if start < rank * share < start + size]
        count += -(-size // BLOCK) + 256 * len({cut // BLOCK for cut in cuts if cut % BLOCK})
    return count


# ---------------------------------------------------------------- tensor parallelism, experts

CUTS = [Cut(1, 2, None), Cut(1, 2, 3), Cut(2, 2, None), Cut(2, 2, 2)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parts_and_pieces_of_these_take_the_steps_of_whole_matrices(name):
    wanted, _, _ = cases.of_parts(name, Cut(1, 1, None))
    start = eight_bit_cases.model(64).state_dict()
    assert max(np.abs(value - start[key]).max() for key, value in wanted.items()) > 0.05
    for cut in CUTS:
        for found, calls, sent in crews.call(CASES + "of_parts", cut.dp * cut.tp, (name, cut)):
            for key, value in wanted.items() if found else ():
                np.testing.assert_allclose(found[key], value, rtol=0, atol=1e-10, err_msg=f"{cut} {key}")
            assert cut.stage or not [axis for axis, _ in calls if axis != "tp"]
            assert calls["tp", "all_reduce"] == 3
            if name == "adafactor":
                lines = sum(map(sum, [(192, 64), (64, 64), (256, 64), (64, 256)]))
                assert sent["tp", "all_reduce"] == 12 * lines + 16 * 6      # two squares of these and of two biases


def test_a_checkpoint_of_parts_is_read_in_any_cut(tmp_path):
    folder = str(tmp_path)
    crews.call(CASES + "of_parts", 4, ("adafactor", Cut(2, 2, 3), folder))
    wanted, _, _ = cases.of_parts("adafactor", Cut(1, 1, None))
    for cut in [Cut(1, 1, None), Cut(1, 2, None), Cut(3, 1, 1), Cut(2, 2, 1)]:
        found, _, _ = crews.call(CASES + "of_parts", cut.dp * cut.tp, ("adafactor", cut, folder, 2))[0]
        for key, value in wanted.items():
            np.testing.assert_allclose(found[key], value, rtol=0, atol=1e-10, err_msg=f"{cut} {key}")
    there = checkpoints.Index.read(f"{folder}/2").arrays
    assert there["optimizer.row_var.1.attention.qkv.weight"]["shape"] == [192, 1]


def furthest(pieces, wanted):
    return max(float(abs(values - wanted[name][tuple(slice(*side) for side in box)]).max())
               for name, box, values in pieces)


def test_divided_experts(tmp_path):
    """A curve on any mesh, and from one mesh's checkpoint to another's: each rank has its experts' means alone."""
    ways = [Way(2, 3, optimizer="adafactor"), Way(4, 1, optimizer="adafactor"), Way(2, 0, optimizer="adafactor"),
            Way(2, 2, over=("ep",), optimizer="adafactor"), Way(1, 3, optimizer="adafactor")]
    it = moe_zero_cases.Training(Way(1, 0, optimizer="adafactor"))
    seen = crews.call("tests.parallel.moe_zero_cases:one_after_another", 4, (ways, str(tmp_path)))
    for way, found in zip(ways, zip(*seen, strict=True), strict=True):
        wanted = {name: array for name, _, array in it.run(1).pieces()}
        assert all(furthest(pieces, wanted) < 1e-10 for pieces, _ in found), way
    arrays = checkpoints.Index.read(tmp_path / "1").arrays
    up = arrays["optimizer.row_var.blocks.0.mlp.experts.up"]
    assert up["shape"] == [4, 24, 1] and len(up["pieces"]) == 4


def test_full_states_of_divided_experts_know_nothing_of_ranks():
    first, second = Way(2, 3, optimizer="adafactor"), Way(4, 1, optimizer="adafactor")
    found = crews.call("tests.parallel.moe_zero_cases:full_states", 4, (first, second))
    (state, optimizer, *_), *others = found
    assert all(each[:2] == ({}, {}) for each in others)
    model = moe_zero_cases.gpt()
    model.load_state_dict(state)
    moe_zero_cases.OPTIMIZERS["adafactor"](model.parameters()).load_state_dict(optimizer)
    it = moe_zero_cases.Training(Way(1, 0, optimizer="adafactor")).run(3)
    wanted = {name: array for name, _, array in it.pieces()}
    assert all(furthest(pieces, wanted) < 1e-10 for _, _, pieces, _ in found)


# ---------------------------------------------------------------- what is refused

def test_parts_that_do_not_say_who_has_the_others_are_refused():
    for said in crews.call(CASES + "refused", 2):
        assert said["annotated"].startswith(
            "ValueError: Adafactor: 1 of these parameters are parts of matrices ((4, 6) of (8, 6) …) and don't say "
            "which rows and columns the other ranks have")
        assert "as copies don't" in said["copied"]
        assert said["tensor parallel"] == said["annotated vectors"] == "nothing"
        assert said["overlap"].startswith("ValueError") and "number 3 is on 2 of them" in said["overlap"]
        assert said["gap"].startswith("ValueError") and "number 2 is on 0 of them" in said["gap"]


@pytest.mark.parametrize("how", ["gradients", "one has none", "others", "order"])
def test_ranks_that_disagree_are_told_so(how):
    """On all of them, and at once."""
    for ended in ranks.call(CASES + "disagreeing", 2, (how,)):
        assert ended == "MismatchError"
