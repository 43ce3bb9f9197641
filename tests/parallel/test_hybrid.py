"""Hybrid sharding: the curve of one process, in exact mode its bits, for every grid; bytes are counted by axis."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from minitorch_dist.parallel.fsdp.zero import held, sent
from tests.crews import crews

from . import sharded_cases as cases
from . import sharded_misuse_cases as misuse
from .test_fully_sharded import close

CASES = "tests.parallel.hybrid_cases:"

WAYS = [    # (name of CURVES, copies on 4 ranks, stage)
    ("odd", 2, 1), ("mlp, clipped, accumulated", 2, 2), ("gpt, muon, clipped", 2, 3), ("odd", 4, 3)]
EXACT = {   # on so many ranks
    2: [("mlp, clipped", 1, 2), ("odd", 2, 3)],
    4: [("mlp, clipped", 1, 3), ("odd", 2, 1), ("mlp, clipped", 2, 2), ("gpt, muon", 2, 3), ("mlp, clipped", 4, 1)]}


def test_one_curve_on_every_grid():
    """AdamW, Muon, SGD; BatchNorm, dropout, clipping, accumulation, uneven batches; all ranks hold the same."""
    everyone = crews.call(CASES + "curves", 4, (WAYS,))
    for way, seen in zip(WAYS, zip(*everyone, strict=True), strict=True):
        model, optimizer, clip, _, size = cases.CURVES[way[0]]
        wanted_losses, wanted_norms, wanted = cases.one_process(model, optimizer, cases.STEPS, clip, size)
        assert len({values for *_, values, _ in seen}) == 1, way
        for rank, (losses, norms, state, _, unused) in enumerate(seen):
            np.testing.assert_allclose(losses, wanted_losses, rtol=1e-10)
            np.testing.assert_allclose(norms, wanted_norms, rtol=1e-10)
            assert unused == (["unused.weight", "unused.bias"] if model == "odd" else [])
            if rank == 0:
                close(state, wanted)
                assert list(state) == list(wanted)
            else:
                assert state == {}


@pytest.fixture(scope="module")
def exact_alone():
    """{name: (losses, norms, digests)}"""
    names = sorted({name for ways in EXACT.values() for name, *_ in ways})
    seen = crews.call(CASES + "exact_curves", 1, ([(name, 0, 0) for name in names],))[0]
    return {name: found[:3] for name, found in zip(names, seen, strict=True)}


@pytest.mark.parametrize("n", [2, 4])
def test_exact_mode_has_the_bits_of_one_process(exact_alone, n):
    everyone = crews.call(CASES + "exact_curves", n, (EXACT[n],))
    for way, seen in zip(EXACT[n], zip(*everyone, strict=True), strict=True):
        losses, norms, digests = exact_alone[way[0]]
        assert seen[0][2] == digests and len(set(digests)) == len(digests), way
        assert all(got[:2] == (losses, norms) for got in seen) and len({got[3] for got in seen}) == 1, way


@pytest.mark.parametrize("copies", [1, 2])
def test_beside_tensor_parallelism(copies):
    model, optimizer, _, _, size = cases.CURVES["gpt, decay, clipped"]
    losses, _, wanted = cases.one_process(model, optimizer, cases.STEPS, None, size)
    everyone = crews.call(CASES + "tensors", 4, (copies,))
    assert [bool(state) for _, state, _ in everyone] == [True, True, False, False]
    for got, state, parts in everyone:
        np.testing.assert_allclose(got, losses, rtol=1e-10)
        assert len(parts) >= 8
        close(state, {name: np.take(value, parts[name][1], parts[name][0]) if name in parts else value
                      for name, value in wanted.items()} if state else {})


# ---------------------------------------------------------------- counted

@pytest.mark.parametrize("copies, stage", [(1, 3), (2, 1), (2, 2), (2, 3), (4, 2)])
def test_what_each_axis_carries_and_a_rank_holds(copies, stage):
    shards = 4 // copies
    for seen in crews.call(CASES + "counted", 4, (copies, stage)):
        psi, units = sum(seen["units"]), len(seen["units"])
        assert all(size % (shards * 4096) == 0 for size in seen["units"])
        gathers = 2 if stage == 3 else 1
        paper = {("shard", "all_gather"): gathers * 4 * psi * (shards - 1) // shards,
                 ("shard", "reduce_scatter"): 4 * psi * (shards - 1) // shards,
                 ("replicate", "all_reduce"): 2 * 4 * psi // shards * (copies - 1) // copies}
        assert seen["sent"] == {key: n for key, n in paper.items() if n}
        assert sent(stage, 4 * psi, shards, copies) == (
            paper["shard", "all_gather"] + paper["shard", "reduce_scatter"], paper["replicate", "all_reduce"])
        assert seen["calls"].get(("replicate", "all_reduce"), 0) == units * (copies > 1)
        memory = held(stage, psi, shards)
        aligned = 64 * units if shards == 1 else 0      # without others, arrays are aligned by hand
        assert seen["live"]["parameter"] == memory["parameter"] + aligned * (stage < 3)
        assert seen["live"]["optimizer"] == memory["optimizer"] and seen["live"]["gradient"] == memory["gradient"]
        assert seen["fast"] == (copies > 1 and stage > 1)       # in stage 1 they lie in the other window
        check_overlap(seen["events"], units, copies > 1)


def check_overlap(events, units, copied):
    """A unit's sum over the replicas begins before the next but one is reduced, and nobody waits for it before all
    are."""
    begun = [(axis, op) for kind, axis, op in events if kind == "begins"]
    scatter, across = ("shard", "reduce_scatter"), ("replicate", "all_reduce")
    assert begun == ([scatter, *[scatter, across] * (units - 1), across] if copied else [scatter] * units)
    if copied:
        assert [e[1] for e in events[-units:]] == ["replicate"] * units
        assert ("through", *across) not in events[:-units]


# ---------------------------------------------------------------- states

def test_states_go_from_any_grid_to_any(tmp_path):
    *_, wanted = cases.one_process("mlp", "adamw", 6)
    found = crews.call(CASES + "restored", 4, (str(tmp_path),))[0]
    assert len(found) == 5
    for state in found.values():
        close(state, wanted)
    index = json.loads(Path(tmp_path / "2 copies" / "index.json").read_text())
    elements = {name: sum(np.prod([b - a for a, b in piece["box"]], dtype=int) for piece in array["pieces"])
                for name, array in index["arrays"].items()}
    assert elements == {name: np.prod(array["shape"], dtype=int) for name, array in index["arrays"].items()}
    sizes = [index["files"][f"rank-{rank}.safetensors"]["bytes"] for rank in range(4)]
    assert all(1 / 2 < sizes[shard] / sizes[shard + 2] < 2 for shard in (0, 1))     # copies share the writing


# ---------------------------------------------------------------- values, gradients, errors

def test_the_values_are_rank_0s():
    counts = [(name, value.size) for name, value in cases.net().state_dict().items()]
    for seen, kept in crews.call(CASES + "values", 4):
        assert len({digest for pair in seen for digest in pair}) == 1
        assert kept == counts       # each weight once, though two ranks hold it


@pytest.mark.parametrize("stage, units, most", [(1, None, 1), (2, None, 1), (3, [], 2), (2, None, 4)])
def test_parameters_that_some_ranks_use(stage, units, most):
    """One rank, or one copy, alone; and that nobody uses."""
    everyone = crews.call(CASES + "used_by_some", 4, (stage, units, most))
    wanted = misuse.alone(misuse.Maybe(), lambda m, x, rank: m(x, rank < most), range(4))
    unused = ["layers.2.weight", "layers.2.bias"] if most == 4 else []
    assert all(error == "nothing" and names == unused for error, _, names in everyone)
    close({name: g for name, g in everyone[0][1].items() if name not in unused}, wanted)
    assert [whole for _, whole, _ in everyone[1:]] == [{}] * 3


def test_copies_that_go_through_other_units_are_told_so():
    """Of one shape: without their names in the check, one's gradients would be added to the other's."""
    for error, *_ in crews.call(CASES + "used_by_some", 4, (3, None, 2)):
        assert re.search(r"(?s)MismatchError.*all_reduce\([^()]*, layers\.[12]\).*all_reduce\([^()]*, layers\.[12]\)",
                         error), error


def test_a_step_with_inf_is_left_out_by_all():
    assert all(seen == [(True, False), (False, True)] for seen in crews.call(CASES + "scaled", 4))


def test_after_an_exception_the_next_step_is_right():
    wanted = misuse.alone(misuse.Maybe(), lambda m, x, rank: m(x, True), range(4))
    for error, got in crews.call(CASES + "raising", 4)[0].values():
        assert error == "ZeroDivisionError: refused"
        close({name: g for name, g in got.items() if "layers.2" not in name}, wanted)


def test_what_is_no_grid():
    expected = {
        "columns": r"rank 0 .*over 'replicate', ranks \[0, 2\].* would be \[0, 1\].*DeviceMesh\(replicate=…, shard=2",
        "unequal": "the ranks have wrapped different models.*shard_over=3", "mesh": "is a DeviceMesh, .*it must be the",
        "a number": "shard_over is a int, '2'",
        "outside": r"ranks \[0, 1, 2, 3\] of the world; with 4 of the ranks \[[02], [13]\]",
        "turned": r"ranks \[1, 0\]", "overlapping": "different models.*shard_over=1", "some": "shard_over=None"}
    for found in crews.call(CASES + "refused", 4):
        assert "exact mode with 2 micro-shards" in found.pop("exact")
        assert found.pop("backward") == "nothing"       # groups without a mesh
        assert set(found) == set(expected)
        for what, words in expected.items():
            assert found[what].startswith("ValueError") and re.search(words, found[what], re.DOTALL), found[what]
