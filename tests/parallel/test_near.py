"""Values that neighbours keep between forward and backward (ZeRO++'s hpZ, reshard_after_forward=g): not a bit changes;
bytes by axis and memory are closed forms; nobody sees old values."""

import re

import pytest

from tests.crews import crews

from . import near_cases as cases

CASES = "tests.parallel.near_cases:"


@pytest.mark.parametrize("name", cases.RUNS)
def test_the_bits_are_stage_3s(name):
    for rank, (usual, *others) in enumerate(crews.call(CASES + "curves", 4, (name,))):
        assert len(set(map(str, usual[2]))) == (1 if rank else 3) and others == [usual, usual]


def test_what_checkpoints_run_again_comes_from_neighbours():
    usual, near = crews.call(CASES + "checkpointed", 4, (True,)), crews.call(CASES + "checkpointed", 4, (2,))
    for (wanted, all_ranks, psi), (grads, by_axis, _) in zip(usual, near, strict=True):
        assert grads == wanted
        once = 8 * psi * 3 // 4
        again = all_ranks["world"] - once
        assert again >= once and by_axis == {"world": once, "world by 2": again * (1 / 2) / (3 / 4)}


@pytest.mark.parametrize("policy", [None, cases.SHORT], ids=["float32", "16 bits"])
@pytest.mark.parametrize("model, n, group", [("mlp", 4, 2), ("gpt", 4, 2), ("gpt", 6, 3)])
def test_what_each_axis_carries_and_a_rank_keeps(model, n, group, policy):
    for seen in crews.call(CASES + "counted", n, (model, group, policy)):
        sizes, nbytes = sorted(seen["units"], reverse=True), 2 if policy else 4
        psi = sum(sizes)
        scatter = "all_to_all" if policy else "reduce_scatter"
        paper = {("node,gpu", "all_gather"): nbytes * psi * (n - 1) // n,
                 ("gpu", "all_gather"): nbytes * psi * (group - 1) // group,
                 ("node,gpu", scatter): nbytes * psi * (n - 1) // n}
        assert {key: seen["sent"].pop(key) for key in paper} == paper
        assert set(seen["sent"]) == {("node,gpu", "all_reduce")}       # who has used what; losses
        assert seen["kept"] == nbytes * psi // group
        assert seen["after"] == seen["after reading"] == seen["live"]["buffer"] == 0
        assert seen["read"] == {("node,gpu", "all_gather"): paper["node,gpu", "all_gather"]}
        if not policy:      # whose buffers are what others send, too
            assert seen["peak"]["buffer"] <= nbytes * (sum(sizes[:2]) + psi // group)


def test_nobody_sees_old_values():
    for rank, found in enumerate(crews.call(CASES + "current_values", 4)):
        assert found.pop("left") == []
        assert found.pop("alone") == (True if rank == 0 else {})
        assert "has overwritten them since" in found.pop("too late")
        assert set(found) == {"gathered", "loaded", "raised in forward", "raised in backward"}
        for what, (seen, wanted) in found.items():
            assert rank or seen == wanted, what


def test_passes_in_other_orders():
    assert crews.call(CASES + "several_passes", 4, (2,)) == crews.call(CASES + "several_passes", 4, (True,))


def test_what_is_no_group():
    expected = {
        "three": "over 3 of the 4 ranks that share a copy: it must be a divisor of 4 above 1",
        "one": "over 1 of the 4 ranks.*False keeps whole values", "none": "over 0 of the 4 ranks",
        "columns": r"rank 0 of 'world' is to reshard over 'node', ranks \[0, 2\].*it would be \[0, 1\].*or the number",
        "text": "reshard_after_forward is a str, '2'", "mesh": "is a DeviceMesh, ", "half": "is a float, '2.0'",
        "beyond a copy": "over 2 of the 1 ranks", "unlike": "different models.*reshard_after_forward=",
        "stage 2": "stage=2, reshard_after_forward over 2 ranks: parameters are cut in stage 3 only",
        "experts": "over 2 ranks of a model with divided experts",
        "pipeline": "reshard_after_forward=2 would be gathered"}
    for found in crews.call(CASES + "refused", 4):
        assert found.pop("all") == "nothing"
        assert set(found) == set(expected)
        for what, words in expected.items():
            assert found[what].startswith("ValueError") and re.search(words, found[what], re.DOTALL), found[what]
