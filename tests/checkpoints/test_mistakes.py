"""Checkpoints where programs err: ranks that don't mean the same, models of all sorts, moments that don't suit."""

import json
import re

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import checkpoints, nn, optim
from tests.crews import crews

from . import cases
from .test_checkpoints import assert_same

MISTAKES = "tests.checkpoints.mistakes:"
CASES = "tests.checkpoints.cases:"


def test_buffers_are_those_of_rank_0(tmp_path):
    """Which the next forward gives to all: others have moved theirs by what they alone have seen."""
    for saved, loaded, run, again in crews.call(MISTAKES + "moving_buffers", 3, args=(str(tmp_path / "a"),)):
        np.testing.assert_array_equal(loaded, saved)
        assert_same(again, run)


def test_ranks_that_hold_different_models_are_told(tmp_path):
    for text in crews.call(MISTAKES + "not_one_model", 2, args=(str(tmp_path / "never"), "models")):
        assert "model.0.weight has other values on rank 1 than on rank 0: a checkpoint would hold some of each" in text
    for text in crews.call(MISTAKES + "not_one_model", 2, args=(str(tmp_path / "never"), "chunks")):
        assert "weight, bias is in several of this rank's chunks: names must be those of the whole model" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["split", "None"])
def test_groups_of_ranks_that_save_at_one_path(tmp_path, how):
    """By mistake, each as if it were the only one: one is the first, and nothing of the others' comes among its own."""
    for number in range(5):
        path, model = tmp_path / str(number), nn.Linear(30, 20)
        told = crews.call(MISTAKES + "several_at_one_path", 3, args=(str(path), how))
        assert sorted("there is a checkpoint already" in text for text in told) == [False, True, True]
        rank = checkpoints.load(path, model)["rank"]
        assert told[rank] == "saved" and all((p.numpy() == rank).all() for p in model.parameters())


def test_all_ranks_must_load_the_same(tmp_path):
    paths = [str(tmp_path / name) for name in "ab"]
    for number, path in enumerate(paths):
        checkpoints.save(path, cases.mlp(), None, {"number": number})
    for text in crews.call(MISTAKES + "from_two_folders", 2, args=(paths,)):
        assert f"rank 0 finds another checkpoint at {paths[0]} than rank 1 at {paths[1]}" in text


def test_what_no_rank_knows_all_ranks_hear_of(tmp_path):
    for text in crews.call(MISTAKES + "unknown_to_all", 2, args=(str(tmp_path / "a"),)):
        assert "has optimizer.exp_avg.0.weight" in text and "which this model and optimizer don't" in text


def test_one_rank_s_optimizer_of_another_model_all_ranks_hear_of(tmp_path):
    for texts in crews.call(MISTAKES + "of_another_model", 2, args=(str(tmp_path / "a"),)):
        assert len(texts) == 2 and all("updates a tensor that is no parameter of this model" in text for text in texts)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("way", ["data", "stage 1", "stage 3", "no_sync"])
def test_loading_gives_up_the_step_under_way(tmp_path, way):
    wanted = cases.Training("mlp", "one").train(0, 4).model.state_dict()
    for left, state in crews.call(MISTAKES + "in_the_middle", 2, args=(str(tmp_path / "a"), way)):
        assert left == []
        assert_same(state, {name: wanted[name] for name in state}, 1e-10)


def test_loading_inside_gathered_is_refused(tmp_path):
    for text in crews.call(MISTAKES + "inside_gathered", 2, args=(str(tmp_path / "a"),)):
        assert "can't be loaded inside gathered()" in text


def test_a_file_that_one_rank_checks_all_ranks_hear_of(tmp_path):
    """Each file is read for its checksum by one of them."""
    for file in ("rank-0.safetensors", "rank-1.safetensors"):
        crews.call(CASES + "begin", 2, args=("mlp", "data", 0, str(tmp_path / file)))
        content = bytearray((tmp_path / file / file).read_bytes())
        content[-100] ^= 1
        (tmp_path / file / file).write_bytes(content)
        for text in crews.call(MISTAKES + "damaged", 2, args=(str(tmp_path / file),)):
            assert f"{file} has changed since it was written" in text


def test_what_rank_0_meets_behind_a_save_all_ranks_hear_of(tmp_path):
    assert crews.call(MISTAKES + "unlisted", 2, args=(str(tmp_path),)) == ["no list"] * 2


def test_a_backward_behind_a_load_is_told_so_on_all_ranks(tmp_path):
    """Also on those that have no piece of what has changed."""
    for texts in crews.call(MISTAKES + "behind_a_load", 2, args=(str(tmp_path / "a"),)):
        assert len(texts) == 6
        for i, text in enumerate(texts):
            by = "load_state_dict" if i % 2 else "loading a checkpoint"
            assert re.search(f"backward.* needs .* but {by} has overwritten (it|them) since", text)


def test_frozen_parameters_of_a_model_that_is_cut(tmp_path):
    """Stay parameters, stay frozen, and are in the checkpoint, with or without being cut."""
    for names, cut in crews.call(MISTAKES + "frozen_parts", 2, args=(str(tmp_path / "a"),)):
        assert cut == names
    model, wanted = cases.mlp(), cases.mlp().state_dict()
    for p in model.parameters():
        p.data[...] = 0
    checkpoints.load(tmp_path / "a", model)
    assert_same(model.state_dict(), wanted)


def test_ranks_that_disagree_are_told(tmp_path):
    for text in crews.call(CASES + "disagreeing", 2, args=(str(tmp_path / "never"),)):
        assert "the optimizers' groups have other settings on rank 1 than on rank 0" in text
    assert list(tmp_path.iterdir()) == []


def test_two_arrays_by_one_name(tmp_path):
    """Of which one would be lost."""
    model = nn.Sequential(nn.Linear(2, 3))
    for value in (nn.Parameter(np.ones((3, 2), np.float32)), nn.Linear(2, 3)):
        with pytest.raises(ValueError, match=r"Sequential.0.weight: names have no dots"):
            setattr(model, "0.weight", value)
    assert list(model.state_dict()) == ["0.weight", "0.bias"]
    setattr(model, "0.note", 3)     # which is no state
    pieces = [("w", (4,), "<f4", [((0, 2),), ((2, 4),)])]
    with pytest.raises(ValueError, match="two pieces have one name"):
        checkpoints.Index.planned([[*pieces, ("w[2:4]", (4,), "<f4", [((0, 4),)])]])


KINDS = ["f2", "f4", "f8", ">f4", ">i8", "?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "c8"]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5, 3)])
def test_arrays_of_all_kinds(tmp_path, shape):
    """As buffers, under names of all sorts; and they are where other programs look for them."""
    from safetensors.numpy import load_file

    def made(fill):
        model = nn.Linear(2, 3)
        for i, kind in enumerate(KINDS):
            model.register_buffer(f"{kind} [0:{i}]\n\"ä☃", np.full(shape, fill(i), kind))
        model.register_buffer("tensor", mt.tensor(np.full(shape, 0.5 * fill(3))))
        return model
    model, other = made(lambda i: i % 2 + 1), made(lambda i: 0)
    checkpoints.save(tmp_path / "a", model)
    checkpoints.load(tmp_path / "a", other)
    assert_same(other.state_dict(), model.state_dict())
    files, raw = load_file(tmp_path / "a" / "rank-0.safetensors"), (tmp_path / "a" / "rank-0.safetensors").read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:begin])
    assert begin % 8 == 0 and header.keys() == files.keys()     # aligned, for who maps it into memory
    assert not any(entry["data_offsets"][0] % files[name].itemsize for name, entry in header.items())
    assert_same({name.removeprefix("model."): files[name] for name in sorted(files)},
                dict(sorted(model.state_dict().items())))


@pytest.mark.parametrize("kind", ["g", "M8[s]", "V2"])
def test_arrays_that_no_file_can_hold_are_refused(tmp_path, kind):
    model = nn.Linear(2, 3)
    model.register_buffer("odd", np.zeros(3, kind))
    with pytest.raises(ValueError, match=r"can't hold model.odd \("):
        checkpoints.save(tmp_path / "a", model)
    assert list(tmp_path.iterdir()) == []


def test_facts(tmp_path):
    """NumPy's numbers are numbers; lists of numbers in a text stay as they are."""
    model, optimizer = nn.Linear(2, 3), None
    optimizer = optim.SGD(model.parameters(), np.float32(0.5))
    checkpoints.save(tmp_path / "a", model, optimizer, {"loss": np.float32(0.25), "n": np.int64(3), "note": "[ 1, 2 ]"})
    assert checkpoints.load(tmp_path / "a", model, optimizer) == {"loss": 0.25, "n": 3, "note": "[ 1, 2 ]"}
    assert optimizer.lr == 0.5
    with pytest.raises(ValueError, match="the fact when=.* is nothing that JSON can hold"):
        checkpoints.save(tmp_path / "b", model, optimizer, {"n": 3, "when": {1, 2}})
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_memory(tmp_path):
    """Saving takes next to nothing beside what is there, loading one copy and the greatest piece twice more."""
    import tracemalloc

    def peak(work):
        tracemalloc.start()
        work()
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most
    model = nn.Sequential(*(nn.Linear(500, 500) for _ in range(4)))
    optimizer, piece = optim.Adam(model.parameters()), 500 * 500 * 4
    assert peak(lambda: checkpoints.save(tmp_path / "a", model, optimizer)) < 0.2 * piece
    assert peak(lambda: checkpoints.load(tmp_path / "a", model, optimizer, verify=False)) < (12 + 2.2) * piece


def test_state_of_another_shape_than_it_is_said_to_have(tmp_path):
    """It would be written, and nobody could read it."""
    class Rows(optim.SGD):
        """Says of its state that it has a number per row."""

        def own_shapes(self):
            return [{"momentum": p.shape[:1]} for group in self.param_groups for p in group["params"]]
    model = nn.Linear(3, 2, bias=False)
    optimizer = Rows(model.parameters(), lr=0.1, momentum=0.9)
    mt.sum(model(np.ones((4, 3), np.float32))).backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r"save: optimizer.momentum.weight of shape \(2, 3\) isn't what own_sha"):
        checkpoints.save(tmp_path / "there", model, optimizer)
    assert not list(tmp_path.iterdir())
