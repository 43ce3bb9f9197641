"""ZeRO inside of a pipeline is the whole model: against one process's training, to the last bit in exact mode."""

import numpy as np
import pytest

from minitorch_dist.flat import BLOCK
from tests.crews import crews, threads

from . import pipeline_zero_cases as cases

CASES = "tests.parallel.pipeline_zero_cases:"
STAGES = 1, 2, 3

CURVES = {      # by ranks: (schedule, pp, micro-batches, stage, model, dtype, samples, greatest norm)
    4: [*((name, 2, m, stage, "layers", "f8", 13, cases.CLIP)
          for name, m in (("1f1b", 3), ("interleaved", 4), ("zb-h1", 3)) for stage in STAGES),
        ("zb-h1", 2, 3, 3, "special", "f8", 13, None), ("1f1b", 4, 5, 3, "layers", "f8", 13, cases.CLIP),
        *((name, 2, m, stage, "tied", "f8", 13, cases.CLIP)
          for name, m in (("1f1b", 3), ("interleaved", 4), ("zb-h1", 3), ("zb-v", 4)) for stage in (0, *STAGES)),
        ("1f1b", 4, 5, 0, "tied", "f8", 13, None), ("gpipe", 4, 2, 2, "tied", "f8", 13, cases.CLIP)],
    2: [("interleaved", 1, 3, 3, "layers", "f8", 13, cases.CLIP), ("zb-v", 2, 4, 1, "special", "f8", 13, None)],
}
EXACT = {
    4: [*((name, 2, 4, stage, "layers", "f4", 16, cases.CLIP)
          for name in ("1f1b", "interleaved", "zb-h1") for stage in (0, *STAGES)),
        ("zb-v", 4, 8, 3, "layers", "f4", 16, cases.CLIP), ("zb-h1", 2, 4, 3, "norms", "f8", 16, cases.CLIP),
        ("interleaved", 2, 4, 0, "layers", "f8", 16, cases.CLIP),
        *((name, pp, 8 * pp // 4, stage, "tied", "f4", 16, cases.CLIP) for name, pp, stage in (
            ("gpipe", 4, 0), ("1f1b", 2, 3), ("interleaved", 2, 0), ("zb-h1", 4, 1), ("zb-h2", 2, 2), ("zb-v", 2, 0),
            ("v-min", 4, 0), ("dualpipev", 2, 1), ("1f1b", 1, 2)))],
    2: [("1f1b", 2, 8, 3, "layers", "f4", 16, cases.CLIP), ("interleaved", 1, 4, 2, "layers", "f4", 16, None)],
}


def wanted(jobs, exact=False):
    """{(model, dtype, samples, clip): (losses, state)} of one process."""
    keys = sorted({job[4:] for job in jobs}, key=str)
    alone = crews.call(CASES + "one_process", 1, ([(*key[:3], exact, key[3]) for key in keys],), env=threads(1))[0]
    return dict(zip(keys, alone, strict=True))


def same(got, wanted, tolerance):
    assert set(got) == set(wanted)
    for name, value in got.items():
        if tolerance:
            np.testing.assert_allclose(value, wanted[name], rtol=tolerance, atol=tolerance, err_msg=name)
        else:
            np.testing.assert_array_equal(value, wanted[name], err_msg=name)


@pytest.mark.parametrize("n", CURVES)
def test_one_curve(n):
    """AdamW, clipping, dropout, batches of 13 that nothing divides; tied weights and a checkpoint ("special")."""
    alone = wanted(CURVES[n])
    for job, ranks in zip(CURVES[n], zip(*crews.call(CASES + "curves", n, (CURVES[n],)), strict=True), strict=True):
        losses, state = alone[job[4:]]
        for got_losses, got in ranks:
            np.testing.assert_allclose(got_losses, losses, rtol=1e-10, err_msg=str(job))
            same(got, state, 1e-10)


@pytest.mark.parametrize("n", EXACT)
def test_exact_mode_has_the_bits_of_one_process(n):
    alone = wanted(EXACT[n], True)
    for job, ranks in zip(EXACT[n], zip(*crews.call(CASES + "curves", n, (EXACT[n], True)), strict=True), strict=True):
        losses, state = alone[job[4:]]
        for got_losses, got in ranks:
            assert got_losses == losses, job
            same(got, state, 0)


def test_a_copy_in_each_row():
    losses, state = wanted([(None, 1, 3, 3, "layers", "f8", 13, None)])["layers", "f8", 13, None]
    for got_losses, got in crews.call(CASES + "copies", 4):
        np.testing.assert_allclose(got_losses, losses, rtol=1e-10)
        same(got, state, 1e-10)


# ---------------------------------------------------------------- counted

@pytest.mark.parametrize("name, m, stage", [("1f1b", 3, 1), ("interleaved", 4, 2), ("interleaved", 2, 3),
                                            ("zb-h1", 5, 3)])
def test_what_travels_when_and_what_is_held(name, m, stage):
    chunks = 2 if name == "interleaved" else 1
    plain = crews.call(CASES + "counted", 4, (name, m, 0))
    for rank, found in enumerate(crews.call(CASES + "counted", 4, (name, m, stage))):
        # Each matrix and its bias are a unit, padded to two blocks of float32; a rank sends half of it.
        n, half = found["matrices"], 4 * BLOCK
        assert n and found["sent"]["dp", "all_gather"] == found["sent"]["dp", "reduce_scatter"] == (n, n * half)
        assert found["sent"]["pp", "send"] == plain[rank]["sent"]["pp", "send"]
        gradients, parameters = (1 if stage > 1 else 2, 1 if stage > 2 else 2)
        assert found["live"]["gradient"] == gradients * n * half and found["live"]["optimizer"] == 2 * n * half
        assert found["live"]["buffer"] == 0 and found["peak"]["buffer"] == (2 * n * half if stage == 3 else 0)
        assert found["live"]["parameter"] >= parameters * n * half
        # The same products in the same steps: nothing of W comes with I.
        assert found["steps"] == plain[rank]["steps"] and found["products"] == plain[rank]["products"]
        begun = [event for event in found["events"] if event[0] == "begins"]
        gathers = [i for i, event in enumerate(begun) if event[1:] == ("dp", "all_gather")]
        sums = [i for i, event in enumerate(begun) if event[1:] == ("dp", "reduce_scatter")]
        assert len(gathers) == len(sums) == n
        # All of a chunk together: in its first forward, and in its last backward. The second chunk is through earlier.
        for places in (gathers, sums):
            assert (places == list(range(places[0], places[0] + n))) == (chunks == 1)
        # The stage before has the last gradient while the sums are under way.
        if rank % 2 and name == "1f1b":
            order = [event for event in found["events"] if event[1:] == ("dp", "reduce_scatter") or event[2] == "isend"]
            last = max(i for i, event in enumerate(order) if event[:2] == ("begins", "pp"))
            assert sum(event[0] == "through" for event in order[:last] if event[1] == "dp") < n


# ---------------------------------------------------------------- what goes with it

def test_a_scaler_leaves_out_the_same_step_everywhere():
    for found in crews.call(CASES + "scaled", 4):
        for (state, scale), (usual, _) in zip(found[:3], found[3:], strict=True):
            same(state, usual, 0)
            assert scale == 2.0 ** 39


def test_what_goes_from_stage_to_stage_is_not_rounded():
    """A policy's inputs and outputs are the whole model's."""
    alone, = crews.call(CASES + "values_of_16_bits", 1, (1,))
    for state in crews.call(CASES + "values_of_16_bits", 2, (2,)):
        for name, value in alone.items():
            np.testing.assert_array_equal(state[name], value, err_msg=name)


def test_16_bits_beside_float32():
    n = BLOCK * 2       # bytes that a rank sends of a unit
    for sent, state, alone in crews.call(CASES + "in_16_bits", 4):
        assert sent["all_gather"] == sent["all_to_all"] == 2 * n
        same(state, alone, 5e-3)


@pytest.mark.parametrize("model", ["layers", "tied"])
@pytest.mark.parametrize("n", [1, 4])
def test_checkpoints_of_other_pipelines_and_of_one_process(model, n, tmp_path):
    _, state = wanted([(None, 1, 3, 3, model, "f8", 13, None)])[model, "f8", 13, None]
    crews.call(CASES + "half", n, (str(tmp_path), model, n > 1))
    for found in crews.call(CASES + "pipelines_go_on", 4, (str(tmp_path), model)):
        for got in found:
            same(got, state, 1e-10)
    same(crews.call(CASES + "one_goes_on", 1, (str(tmp_path), model))[0], state, 1e-10)


@pytest.mark.parametrize("name, calls, place", [("1f1b", 0, 0), ("zb-h1", 1, 0), ("1f1b", 1, 1), ("zb-h1", 0, 1)])
def test_a_stage_that_uses_its_parameters_at_times(name, calls, place):
    wanted = crews.call(CASES + "sometimes", 4, (name, calls, place, 0))
    for stage in (1, 3):
        found = crews.call(CASES + "sometimes", 4, (name, calls, place, stage))
        for (pp, grads), (_, whole) in zip(found, wanted, strict=True):
            for key, pieces in grads.items():
                assert (pieces is None) == (whole[key] is None) == (pp == place and calls == 0)
                if pieces is not None:
                    np.testing.assert_allclose(np.concatenate(pieces), whole[key][0], rtol=1e-12)


def test_who_wants_it_gathered_each_time_is_told():
    for said in crews.call(CASES + "refused", 2):
        assert said is not None and "stage=3, reshard_after_forward=True" in said and "leave the latter out" in said


def test_stage_3_may_keep_values_over_backwards():
    """Three micro-batches: two units are gathered once each, not forward and backward, and freed by the last one."""
    for (usual, keeping), (inside, behind, loaded, again), wanted, live in crews.call(CASES + "kept", 2):
        assert live == [0, 2 * 2 * BLOCK * 8, 0]        # two units on two ranks
        assert usual[0] > keeping[0] == 2 and usual[1] == keeping[1] == 0
        for name, grad in keeping[2].items():
            np.testing.assert_array_equal(grad, usual[2][name])
        np.testing.assert_allclose(inside, wanted, rtol=1e-12)
        np.testing.assert_array_equal(inside, behind)
        assert abs(loaded - behind).max() > 0.1
        np.testing.assert_array_equal(loaded, again)


def test_the_whole_state_of_stages_that_are_cut():
    for found in crews.call(CASES + "whole_state", 4):
        assert found == {"plain": True, "ddp": True, "zero": True}
