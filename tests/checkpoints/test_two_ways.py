"""Checkpoints of models that are cut twice: fully_shard's pieces of tensor parallelism's parts."""

import itertools
from math import prod

import numpy as np
import pytest

from minitorch_dist.checkpoints.index import Index, covers
from minitorch_dist.checkpoints.layout import parted, piece_of, ranged
from minitorch_dist.checkpoints.loading import Reader
from minitorch_dist.flat import boxes_of
from tests.crews import crews

from . import two_ways_cases as cases

CASES = "tests.checkpoints.two_ways_cases:"


def stored(path):
    """{name: array} of all that a checkpoint has, whole."""
    index = Index.read(path)
    reader = Reader(path, index)
    return {name: reader.read(name, [(0, e) for e in kind["shape"]]) for name, kind in index.arrays.items()}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(the path of a checkpoint of pieces of parts, what the ranks have told)."""
    path = tmp_path_factory.mktemp("two ways") / "first"
    return path, crews.call(CASES + "write", 4, ("parts, stage 3", str(path)))


@pytest.fixture(scope="module")
def one_process():
    """{steps: {name: array}} of a run that is never broken off."""
    run = cases.Run("one")
    return {steps: dict(run.train(range(steps - 2, steps)).model.state_dict()) for steps in (2, 4)}


def test_what_is_written_is_the_state_of_one_process(written, one_process):
    path, told = written
    held = stored(path)
    assert {kind for name in held for kind in [name.split(".")[1]] if name.startswith("optimizer")} == {
        "momentum_buffer", "exp_avg", "exp_avg_sq"}
    for name, value in one_process[2].items():
        np.testing.assert_allclose(held[f"model.{name}"], value, rtol=0, atol=1e-10)
    states = [state for state, _ in told if state]
    assert len(states) == 2 and all(np.array_equal(state[name], held[f"model.{name}"])
                                    for state in states for name in one_process[2])
    # The case is as meant: pieces of several boxes, and of the positions pieces that end elsewhere on each tp rank.
    boxes = [boxes for _, boxes in told]
    assert any(len(each) > 2 for held in boxes for each in held.values())
    assert len({held["position.weight"][0] for held in boxes}) == 4


def test_every_way_reads_what_every_other_has_written(written, one_process, tmp_path):
    """From one to the next, all around: parameters and optimizer to the bit; and the training goes on."""
    path, _ = written
    first = stored(path)
    for way in [*cases.WAYS, "one", "parts, stage 3"]:
        dp, t, _ = cases.WAYS[way]
        target = tmp_path / str(len(list(tmp_path.iterdir())))
        ends = crews.call(CASES + "read", dp * t, (way, str(path), str(target)))
        again = stored(target)
        assert set(again) == set(first)
        assert not [name for name in first if again[name].tobytes() != first[name].tobytes()], way
        for name, value in one_process[4].items():
            np.testing.assert_allclose(ends[0][name], value, rtol=0, atol=1e-10, err_msg=way)
        path = target


def test_each_rank_writes_its_pieces(written):
    """No element twice, and none by one rank that has to write for the others."""
    files = Index.read(written[0]).files
    assert len(files) == 4 and max(f["bytes"] for f in files.values()) < 0.5 * sum(f["bytes"] for f in files.values())


@pytest.mark.parametrize("way", ["parts, stage 1", "parts, stage 3", "parts of 4"])
def test_a_whole_state_goes_in_and_comes_out(way):
    dp, t, stage = cases.WAYS[way]
    assert sorted(crews.call(CASES + "loaded_state", 4, (way,)), key=bool) == [None] * (0 if stage is None else 2) + [
        True] * (4 if stage is None else 2)


def test_copies_that_differ_are_found_where_they_lie_otherwise(tmp_path):
    """Rank 3's range of the parameter is another one than rank 2's or 1's."""
    for text in crews.call(CASES + "other_values", 4, (str(tmp_path / "never"),)):
        assert "has other values on rank" in text
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- boxes

def test_a_range_is_at_most_2d_minus_1_boxes_one_after_another():
    most = {}
    for shape in [(), (7,), (3, 5), (3, 3, 4), (2, 1, 3, 2), (1, 4, 1)]:
        x = np.arange(prod(shape)).reshape(shape)
        for start, stop in itertools.combinations_with_replacement(range(x.size + 1), 2):
            boxes = boxes_of(shape, start, stop)
            found = [x[tuple(slice(*side) for side in box)].ravel() for box in boxes]
            assert np.concatenate([[], *found]).tolist() == list(range(start, stop)), (shape, start, stop)
            most[shape] = max(most.get(shape, 0), len(boxes))
    assert most == {(): 1, (7,): 1, (3, 5): 3, (3, 3, 4): 5, (2, 1, 3, 2): 4, (1, 4, 1): 1}
    assert boxes_of((3, 0, 2), 0, 0) == [((0, 3), (0, 0), (0, 2))] and boxes_of((3, 2), 4, 4) == []


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_ranges_of_parts_are_the_whole_together(axis):
    """Of runs along an axis, as heads' queries, keys and values; as numbers that each know their place."""
    shape, random = [4, 5, 3], np.random.default_rng(axis)
    shape[axis] = 9
    x = np.arange(prod(shape)).reshape(shape)
    order, boxes, whole = random.permutation(9), [], np.full(shape, -1)
    for indices in np.split(order, [4, 5]):
        part = x.take(indices, axis)
        ends = [0, *sorted(random.integers(0, part.size, 3).tolist()), part.size]
        for start, stop in itertools.pairwise(ends):
            layout = parted(part.shape, axis, indices, 9, (start, stop))
            mine = part.ravel()[start:stop].reshape(1, 1, -1)
            assert layout.shape == tuple(shape)
            for box, place in layout.pieces:
                index = tuple(slice(*side) for side in box)
                assert x[index].size and np.array_equal(piece_of(mine, place), x[index])
                whole[index] = piece_of(mine, place)
                boxes.append(box)
    assert np.array_equal(whole, x) and covers(boxes, shape)


ALL, HALVES = ((0, 4), (0, 3)), [((0, 2), (0, 3)), ((2, 4), (0, 3))]


@pytest.mark.parametrize("boxes, shape, each_once", [
    ([ALL], (4, 3), True), (HALVES, (4, 3), True), ([((0, 6),), ((6, 12),)], (4, 3), True), ([()], (), True),
    ([((0, 4),), ((4, 4),)], (4,), True), ([((0, 0), (0, 3))] * 2, (0, 3), True), ([((0, 1),)], (), True),
    ([], (4, 3), False), ([], (0, 3), False), ([ALL, ALL], (4, 3), False), (HALVES[:1], (4, 3), False),
    ([((0, 3), (0, 3)), ((2, 3), (0, 3))], (4, 3), False), ([HALVES[0], ((6, 12),)], (4, 3), False),
    ([((-2, 2), (0, 3))], (4, 3), False), ([((1, 5), (0, 3))], (4, 3), False), ([((4, 0), (3, 0))], (4, 3), False)])
def test_which_boxes_are_the_whole(boxes, shape, each_once):
    assert covers(boxes, shape) == each_once


def test_pieces_are_cut_where_others_end():
    pieces = ranged((12,), (3, 9)).cut_at({0, 3, 5, 8, 9, 12}).pieces
    assert [box for box, _ in pieces] == [((3, 5),), ((5, 8),), ((8, 9),)]
    empty = ranged((12,), (4, 4))
    assert empty.cut_at({2, 4}) == empty and empty.ends() == {4}
    x = np.arange(20).reshape(4, 5)
    for layout, mine in ((ranged((4, 5), (3, 17)), x.ravel()[3:17]),
                         (parted((6,), 0, np.array([2, 3, 4, 7, 8, 9]), 10), np.array([2, 3, 4, 7, 8, 9])),
                         (parted((6,), 0, np.array([2, 3, 4, 7, 8, 9]), 10, (1, 5)), np.array([3, 4, 7, 8]))):
        found = layout.cut_at({4, 8, 16})
        assert len(found.pieces) > len(layout.pieces) and found.shape == layout.shape
        for ((start, stop),), place in found.pieces:
            assert piece_of(mine, place).tolist() == list(range(start, stop))
    boxed = parted((2, 5), 0, np.array([1, 3]), 4)
    assert boxed.cut_at({1, 2}) == boxed and not boxed.ends()
