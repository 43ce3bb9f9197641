"""Parameters that several stages of a pipeline have are one: beside one process that has them once.

test_pipeline_zero.py has whole trainings, ZeRO and checkpoints.
"""

import copy
import pickle

import numpy as np
import pytest

from minitorch_dist import nn, optim
from minitorch_dist.parallel.pipelines import cut_sequential
from minitorch_dist.parallel.tied import Tie, is_copy, name_of, tie_of
from tests.crews import crews

from .pipeline_zero_cases import tied

CASES = "tests.parallel.tied_cases:"


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_gradients_are_one_process_s_of_two_batches(name):
    """Plain stages, to whose gradients a second batch adds its own; of zb-v one rank has the first and the last."""
    found = crews.call(CASES + "summed", 2, (name,))
    for gradients, wanted, norm, sent in found:
        for key, value in gradients.items():
            np.testing.assert_allclose(value, wanted[key], rtol=1e-11, atol=1e-13, err_msg=key)
        once = {id_: wanted[id_] for id_ in ("0.weight", "0.bias", "3.weight", "3.bias")}
        assert norm == pytest.approx(np.sqrt(sum((value ** 2).sum() for value in once.values())), rel=1e-12)
        # A ring's all-reduce between two: of the matrix 7 × 9 in both schedules, and of 9 × 9.
        assert sent == {"world tied": 8 * (63 + 81)}
    assert {key for gradients, *_ in found for key in gradients} >= {"0.weight", "5.weight", "3.weight", "9.weight"}


def test_a_second_batch_is_added_wherever_the_gradients_are():
    for found in crews.call(CASES + "accumulated", 2):
        assert len(found) == 4
        for what, gradients, wanted in found:
            for key, value in gradients.items():
                np.testing.assert_allclose(value, wanted[key], rtol=1e-11, atol=1e-13, err_msg=f"{what}: {key}")


def test_a_copy_s_checkpoint_is_its_own():
    for here, alone in crews.call(CASES + "recomputed", 2):
        assert abs(alone[2] - alone[0]) > 1e-3
        np.testing.assert_allclose(here, alone, rtol=1e-12)


def test_a_layer_in_several_stages_draws_what_it_draws_in_one_process():
    for here, alone in crews.call(CASES + "one_layer_in_several_places", 2):
        np.testing.assert_allclose(here, alone, rtol=1e-12)


@pytest.mark.parametrize("stage", [1, 3])
def test_shards_of_it_are_alike_in_each_stage_whatever_is_beside_it(stage):
    """6,300 elements, more than a block, in stages that are one unit otherwise."""
    found = crews.call(CASES + "shards", 4, (stage,))
    for part, (gradients, wanted) in enumerate(found):
        assert set(gradients) == ({"0.weight", "0.bias", "1.weight", "1.bias"} if part % 2 == 0 else
                                  {"2.weight", "3.weight", "3.bias"})
        for name, value in gradients.items():
            np.testing.assert_allclose(value, wanted[name].reshape(-1), rtol=1e-11, atol=1e-13, err_msg=name)


def test_one_that_a_stage_does_not_use_gets_the_others_gradient():
    first, second = crews.call(CASES + "unused", 2)
    for mine, theirs in zip(first, second, strict=True):
        assert np.abs(mine).max() > 1e-3
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("what", ["plain", "DDP", "exact", "ZeRO 1", "ZeRO 3"])
def test_one_that_no_stage_uses_has_no_gradient(what):
    """And so no weight decay, which one of zeros would have."""
    for (values, steps), (wanted, alone) in crews.call(CASES + "unused_everywhere", 4, (what,)):
        assert steps == [2, 0, 2] and alone[:2] == [2, 0]
        for name, value in values.items():
            np.testing.assert_allclose(value, wanted[name], rtol=1e-11, atol=1e-13, err_msg=name)


def test_one_that_no_stage_uses_keeps_the_gradient_that_it_has():
    for gradient in crews.call(CASES + "unused_after", 2):
        assert (gradient == 3).all()


def test_what_a_later_stage_has_of_its_gradient_keeps_its_bits():
    """Also where that is nothing, and where it looks like nothing."""
    for found in crews.call(CASES + "exact_behind", 2):
        assert len(found) == 3
        for copy_of_it, alone in found:
            assert np.abs(alone).max() > 1e-3
            np.testing.assert_array_equal(copy_of_it, alone)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_a_frozen_one_is_one_too(tmp_path, name, stage):
    """In whole states and checkpoints; stage 3 cuts it as it does what is trained."""
    for wanted, together, read in crews.call(CASES + "frozen", 2, (str(tmp_path / "a"), name, stage)):
        own = {key: value for key, value in wanted.items() if key[0] not in "589"}
        assert set(together) == set(own) == {"0.weight", "0.bias", "3.weight", "3.bias"}
        for key, value in wanted.items():
            np.testing.assert_array_equal(read[key], value, err_msg=key)
            np.testing.assert_array_equal(together.get(key, value), value, err_msg=key)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_frozen_one_may_be_cut_in_one_stage_and_whole_in_another(stage):
    for (values, losses), (wanted, alone) in crews.call(CASES + "frozen_beside_zero", 4, (stage,)):
        np.testing.assert_allclose(losses, alone, rtol=1e-12)
        assert set(values) == set(wanted)
        for name, value in wanted.items():
            np.testing.assert_allclose(values[name], value, rtol=0, atol=1e-12, err_msg=name)


def test_stages_have_tensors_of_their_own():
    model = tied("f8")
    before = {name: p.numpy().copy() for name, p in model.named_parameters(remove_duplicate=False)}
    stages = cut_sequential(model, 3, [1] * 10)
    params = [dict(stage.named_parameters()) for stage in stages]
    assert [sorted(each) for each in params] == [["0.bias", "0.weight"], ["3.bias", "3.weight", "5.weight"],
                                                 ["8.weight", "9.weight"]]
    assert len({id(p) for each in params for p in each.values()}) == 7
    for each in params:
        for name, p in each.items():
            np.testing.assert_array_equal(p.numpy(), before[name])
    assert tie_of(params[0]["0.weight"]) == Tie("0.weight", False) and tie_of(params[0]["0.bias"]) is None
    for each, name, original in ((params[1], "5.weight", "0.weight"), (params[2], "8.weight", "0.weight"),
                                 (params[2], "9.weight", "3.weight")):
        assert tie_of(each[name]) == Tie(original, True) and is_copy(each[name])
        assert name_of(each[name], name) == original
    assert not is_copy(params[1]["3.weight"]) and name_of(params[1]["3.bias"], "3.bias") == "3.bias"
    assert all(a is b for a, b in zip(stages[0], list(model)[:3], strict=False))    # what shares nothing is as it was
    assert stages[1]._modules["3"] is model[3] and stages[2]._modules["8"] is not model[8]
    for twin in (copy.deepcopy(stages[2]), pickle.loads(pickle.dumps(stages[2]))):
        assert tie_of(dict(twin.named_parameters())["9.weight"]) == Tie("3.weight", True)


def test_within_a_stage_one_tensor_stays_one():
    first = nn.Linear(4, 4)
    twice = nn.Sequential(first, nn.Tanh(), first, first)
    stage = cut_sequential(twice, 2, [1] * 4)[1]
    assert stage._modules["2"] is stage._modules["3"] is not first and len(list(stage.parameters())) == 2
    frozen = nn.Linear(4, 4).requires_grad_(False)
    stage = cut_sequential(nn.Sequential(frozen, frozen), 2)[1]
    assert tie_of(stage._modules["1"].weight) == Tie("0.weight", True) and not stage._modules["1"].weight.requires_grad


def test_running_statistics_in_two_stages_are_refused():
    """Each stage would move its own, and in evaluation none would be one process's."""
    norm = nn.BatchNorm(4)
    model = nn.Sequential(norm, nn.Linear(4, 4), norm, nn.Linear(4, 4))
    with pytest.raises(ValueError, match="stages 0 and 1 have one BatchNorm, 0 and 2, and each would move running"):
        cut_sequential(model, 2, [1] * 4)
    assert len(cut_sequential(model, 2, [1, 1, 1, 3])) == 2     # both in one stage
    experts = {kind: nn.MoE(4, 4, 2, expert_bias=kind) for kind in (True, False)}
    with pytest.raises(ValueError, match="stages 0 and 1 have one MoE, 0 and 1, and each would move experts' biases"):
        cut_sequential(nn.Sequential(experts[True], experts[True]), 2)
    assert len(cut_sequential(nn.Sequential(experts[False], experts[False]), 2)) == 2


def test_a_copy_counts_once_in_a_norm():
    stages = cut_sequential(tied("f8"), 2, [1] * 10)
    params = [p for stage in stages for p in stage.parameters()]
    for p in params:
        p.grad = np.ones(p.shape)
    size = sum(p.size for p in tied("f8").parameters())
    assert sum(p.size for p in params) == size + 2 * 63 + 81 - 63
    assert optim.clip_grad_norm_(params, 1.0) == pytest.approx(np.sqrt(size), rel=1e-12)
    for p in params:        # and is scaled like all
        np.testing.assert_allclose(p.grad.numpy(), 1 / np.sqrt(size), rtol=1e-5)


def test_errors_say_what_to_do():
    expected = {
        "exact": ("ValueError", "in exact mode the gradients of 0.weight, 3.weight", "go from stage to stage",
                  "rank 0 before W0 of stage 0, rank 1 before F1 of stage 1"),
        "frozen": ("ValueError", "0.weight is tied, and not alike: float64 [9, 7] in stage 0; float64 [9, 7], frozen"),
        "shape": ("ValueError", "3.weight is tied", "float64 [9, 9] in stage 0; float64 [4, 4] in stage 1"),
        "later": ("MismatchError", "0.weight, which several stages have, was trained when the Pipeline was made, and "
                                   "is frozen"),
    }
    for found in crews.call(CASES + "errors", 2):
        assert set(found) == set(expected)
        for name, (kind, *words) in expected.items():
            assert found[name] is not None, f"{name}: accepted"
            assert found[name][0] == kind and all(each in found[name][1] for each in words), found[name]
