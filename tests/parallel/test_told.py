"""Errors that a first afternoon meets: each says what is wrong, and what to do."""

import numpy as np
import pytest

from minitorch_dist import backend
from minitorch_dist.testing import ranks
from tests.crews import crews

from .test_tensor_misuse import told

CASES = "tests.parallel.told_cases:"


def test_what_a_communication_hook_returns():
    for found in crews.call(CASES + "hooks", 2):
        told(found, {kind: ("TypeError", f"a communication hook has returned a {kind}: it returns a fun", "work.wait")
                     for kind in ("Work", "ndarray", "NoneType")})


def test_sums_of_another_step_are_named():
    for found in crews.call(CASES + "adversaries", 2):
        told({"": found}, {"": ("RuntimeError", "already, of 2.bias, 2.weight, 0.bias, 0.weight, and would",
                                "call zero_grad() of their model before it")})


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_step_of_what_nobody_divides(n):
    """Of what a Loader without rank and size gives, all ranks have all rows; nothing is stepped."""
    for found, same in crews.call(CASES + "steps", n):
        everything, ours = found.pop("everything"), found.pop("ours")
        told(found, {"plain": ("TypeError", "train_step: a Linear, whose gradients nobody sums", "DistributedDataPara"),
                     "no world": ("TypeError", "world is None; give", "comm.world()")})
        assert ours is None and same == (n > 1)
        if n > 1:
            told({"": everything}, {"": ("ValueError", f"a batch of 12 samples, of which the {n} ranks have {12 * n}",
                                         "Loader(…, rank=world.rank, size=world.size)")})


def test_a_stage_that_gives_a_pair_ends_the_job():
    with pytest.raises(AssertionError, match="TypeError: Pipeline: stage 0 gives a tuple; what goes from"):
        ranks.call(CASES + "a_stage_of_two", 2, limit=20)


def test_a_stages_norm_is_not_the_models():
    """A rank alone is the model."""
    everyone = crews.call(CASES + "stages_clipped", 2)
    whole = sum(sum(squares) for _, _, squares, _ in everyone) ** 0.5
    for found, one, (_, bias), norm in everyone:
        told({"": found}, {"": ("ValueError", "all parameters of this rank's stages", "take pipeline.clip_")})
        assert abs(one - bias ** 0.5) < 1e-12 * one and abs(norm - whole) < 1e-12 * whole
    (found, *_), = crews.call(CASES + "stages_clipped", 1)
    assert found is None


def test_micro_shards_of_one_sample():
    for found in crews.call(CASES + "small_micro_shards", 2):
        told({"": found}, {"": ("ValueError", "2 or more values per channel, got 1", "in exact mode each micro-")})


def test_a_checkpoint_that_each_rank_writes(tmp_path):
    found = [said for said in crews.call(CASES + "saved_by_each", 2, args=(str(tmp_path),)) if said is not None]
    told({"": found[0]}, {"": ("FileExistsError", "perhaps another rank's: 2 ranks write one together where")})


def test_another_optimizers_checkpoint(tmp_path):
    """Which it is comes before the arrays that it lacks therefore."""
    found, = crews.call(CASES + "loaded_into_another", 1, args=(str(tmp_path),))
    told({"": found}, {"": ("CheckpointError", "is of a AdamW, this run has a SGD")})


@pytest.mark.parametrize("rows", [np.arange(4), 3, (0, 1, 2)], ids=["array", "number", "three"])
def test_rows_are_a_pair(rows):
    with pytest.raises(ValueError, match=r"random_scope: rows .* must be the pair \(first, last \+ 1\)"):
        with backend.random_scope(0, 0, 4, rows):
            pass
