"""Mistakes with tensor parallelism: an error on all ranks says what is wrong, before anything is cut."""

import numpy as np
import pytest

from minitorch_dist import nn
from minitorch_dist.parallel.tensor.between import dropouts
from tests.crews import crews

CASES = "tests.parallel.tensor_misuse_cases:"


def told(found, expected):
    """AssertionError unless each error is of its kind, and has the words."""
    assert set(found) == set(expected)
    for name, (kind, *words) in expected.items():
        assert found[name] is not None, f"{name}: accepted"
        assert found[name][0] == kind and all(word in found[name][1] for word in words), found[name]


def test_ranks_with_other_models_cut_nothing():
    same = "parallelize_module: the ranks' models or plans differ; the first difference:"
    advice = "Build the model from the same seed, and cut it by the same plan, on all ranks."
    for rank, (found, whole) in enumerate(crews.call(CASES + "other_models", 2)):
        assert whole
        told(found, {
            "seed": ("ValueError", same, "rank 0: 0.weight: float64 [6, 4], values ", "rank 1: 0.weight: ", advice),
            "last bit": ("ValueError", same, "rank 1: 2.bias: float64 [4], values "),
            "plan": ("ValueError", same, "rank 1: 0: 'column, gathered'"),
            "pattern": ("ValueError", "'7' meets no module" if rank else "rank 1: parallelize_module: '7' meets no"),
            "option": ("ValueError", same, "rank 1: sequence_parallel='regather'"),
            "frozen": ("ValueError", same, "rank 0: 2.weight: float64 [4, 6], values", "[4, 6], frozen, values"),
            "size": ("ValueError", same, "rank 1: weight: float32 [5, 4]"),
            "buffer": ("ValueError", same, "rank 1: 1.running_mean: float32 [6]"),
        })


def test_what_is_cut_already_is_each_ranks_own():
    """By an earlier call, over the same ranks or others; beside frozen parameters."""
    assert crews.call(CASES + "one_after_the_other", 4) == [
        ["ColumnParallelLinear", "RowParallelLinear"] * 2 + ["ColumnParallelLinear"]] * 4


def test_a_mesh_is_no_communicator():
    """Who takes one says which axis is meant; whatever else does that an axis has one."""
    (found, has_rank), = crews.call(CASES + "meshes", 1)
    told(found, {
        name: ("TypeError", "comm is a DeviceMesh, of axes dp, tp; it must be the Communicator of the", words)
        for name, words in {
            **dict.fromkeys(("data parallel", "ZeRO"), 'ranks that divide the samples, as mesh["dp"]'),
            "matrices": 'ranks that share the matrices, as mesh["tp"]',
            "sequences": 'ranks that share the sequences, as mesh["cp"]',
            "stages": 'ranks that have the stages of one pipeline, as mesh["pp"]'}.items()} | {
        "others": ("AttributeError", "a DeviceMesh, of axes dp, tp, has no 'rank'", 'as mesh["tp"], or mesh.world')})
    assert not has_rank


def test_what_a_row_is_given_is_this_ranks_part():
    """A plan of rows alone; one's own attention, that goes by the time of its input."""
    for found in crews.call(CASES + "given_to_rows", 2):
        told(found, {
            "row alone": ("ValueError", "RowParallelLinear: x (3, 6) has 6 features, and this rank takes its 3 of 6",
                          "it came whole: call the layer before it 'column'", "input_is_parallel=False"),
            "other": ("ValueError", "x (3, 5) has 5 features, and this rank takes its 3 of 6"),
            "attention": ("ValueError", "x (2, 3, 8) has 8 features, and this rank takes its 4 of 8",
                          "what a 'column' makes with sequence_parallel are whole sequences, (batch, time, features)"),
        })


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_whole_parameter_between_column_and_row(n):
    """It is found at the first forward on the tape, once; copy_to sums its gradient."""
    for found, whole, summed, waiting in crews.call(CASES + "between_parts", n):
        if n == 1:
            assert found == {"a parameter": None, "a norm": None}
        else:
            told(found, {"a parameter": ("RuntimeError", "has its part of the features, stands temp, whose gradient",
                                         "and the ranks' models would part", "copy_to(temp, comm)"),
                         "a norm": ("RuntimeError", "stand 1.weight, 1.bias, whose gradients would be of this part")})
        assert abs(summed - whole) < 1e-13 * abs(whole) and abs(whole) > 0.01 and not waiting


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize(("kind", "n"), [("plain", 1), ("plain", 2), ("gated", 2), ("plain", 4), ("gated", 4)])
def test_a_dropout_between_column_and_row_drops_what_one_process_drops(kind, n, sequence_parallel):
    for whole, cut in crews.call(CASES + "dropped", n, args=(kind, sequence_parallel)):
        for got, wanted in zip(cut, whole, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-13)


def test_which_dropouts_have_a_part_of_the_features():
    """Those between a column and its row: not those between a row and the next column, nor those of other classes."""
    class Own(nn.Dropout):
        pass
    layers = [nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 4), nn.Dropout(0.1)]
    model = nn.Sequential(*layers, nn.Linear(4, 4), nn.Dropout(0.1), Own(0.1), nn.Linear(4, 4), nn.Dropout(0.1))
    chosen = {"0": "column", "2": "row", "4": "column", "7": "row"}
    assert dropouts(dict(model.named_modules()), chosen) == {"1": ("0", False), "5": ("4", False)}


def test_a_dropout_in_two_places():
    for found in crews.call(CASES + "in_two_places", 2):
        told({"": found}, {"": ("ValueError", "the Dropout 1 works on this rank's part", "stands in 3 as well")})
