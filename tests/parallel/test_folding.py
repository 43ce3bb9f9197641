"""Experts over ranks that share the sequences, too: each routes its own positions; one curve, no work done twice."""

import numpy as np
import pytest

from tests.crews import crews

CASES = "tests.parallel.folding_cases:"
MESHES = [(2, {"tp": 2}), (3, {"tp": 3}), (4, {"ep": 2, "tp": 2}), (4, {"tp": 2}), (4, {"cp": 2, "tp": 2}),
          pytest.param(8, {"ep": 2, "tp": 2}, marks=pytest.mark.thorough)]


@pytest.fixture(scope="module")
def one_process():
    """{(setting, optimizer): what it gives}"""
    found = {}

    def of(setting, optimizer="AdamW"):
        if (setting, optimizer) not in found:
            found[setting, optimizer], = crews.call(CASES + "train", 1, args=(setting, {}, 0, optimizer))
        return found[setting, optimizer]
    return of


def compared(got, wanted):
    losses, norms, state, loads = got
    np.testing.assert_allclose(losses, wanted[0], rtol=1e-10)
    np.testing.assert_allclose(norms, wanted[1], rtol=1e-10)
    assert loads == wanted[3]
    if state:
        assert state.keys() == wanted[2].keys()
        for name, value in state.items():
            rows = [*range(12), *range(24, 36)] if name.endswith("qkv.bias") else ...      # keys' have no gradient
            np.testing.assert_allclose(value[rows], wanted[2][name][rows], rtol=1e-8, atol=1e-10, err_msg=name)
    return bool(state)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("n", "mesh"), MESHES)
@pytest.mark.parametrize("setting", ["balanced", "as DeepSeek-V3"])
def test_one_curve_on_any_mesh(one_process, setting, n, mesh, stage):
    found = crews.call(CASES + "train", n, args=(setting, mesh, stage))
    states = [compared(got, one_process(setting)) for got in found]
    assert sum(states) == (mesh["tp"] if stage else n)


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("n", [2, 3])
def test_ranks_that_share_sequences_alone(one_process, n, stage):
    for got in crews.call(CASES + "train", n, args=("balanced", {"cp": n}, stage)):
        compared(got, one_process("balanced"))


@pytest.mark.parametrize("n", [2, 3])
def test_groups_of_all_of_a_call(one_process, n):
    """Where ranks with samples of their own have groups of their own there are others; so tp alone."""
    for got in crews.call(CASES + "train", n, args=("of all of a call", {"tp": n})):
        compared(got, one_process("of all of a call"))


@pytest.mark.parametrize(("n", "mesh", "over"), [(2, {"cp": 2}, ["cp"]), (4, {"cp": 2, "tp": 2}, ["cp", "tp"]),
                                                 (4, {"cp": 2, "ep": 2}, ["cp", "ep"])])
@pytest.mark.parametrize("stage", [0, 3])
def test_experts_over_ranks_of_a_ring(one_process, n, mesh, over, stage):
    """As ranks with samples of their own: DistributedDataParallel has all of these."""
    for got in crews.call(CASES + "train", n, args=("as DeepSeek-V3", mesh, stage, "AdamW", {"over": over})):
        compared(got, one_process("as DeepSeek-V3"))


@pytest.mark.parametrize("how", [{"first": "experts"}, {"sequence_parallel": "regather"}, {"overlap": True}],
                         ids=lambda how: str(*how))
@pytest.mark.parametrize(("n", "mesh"), MESHES[2:3])
def test_one_curve_whatever_the_cut(one_process, n, mesh, how):
    for got in crews.call(CASES + "train", n, args=("as DeepSeek-V3", mesh, 0, "AdamW", how)):
        compared(got, one_process("as DeepSeek-V3"))


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("optimizer", ["Muon", "Adafactor"])
def test_optimizers_of_whole_matrices(one_process, optimizer, stage):
    for got in crews.call(CASES + "train", 4, args=("as DeepSeek-V3", {"ep": 2, "tp": 2}, stage, optimizer)):
        compared(got, one_process("as DeepSeek-V3", optimizer))


@pytest.mark.thorough
@pytest.mark.parametrize("stage", [0, 3])
def test_checkpoints_go_on_anywhere(tmp_path, stage):
    setting, here, there = "as DeepSeek-V3", (4, {"ep": 2, "tp": 2}), (2, {"tp": 2})
    crews.call(CASES + "train", 1, args=(setting, {}, 0, "AdamW", (), None, tmp_path / "one"))
    wanted, = crews.call(CASES + "train", 1, args=(setting, {}, 0, "AdamW", (), tmp_path / "one", tmp_path / "two"))
    for n, mesh in (here, there):
        for got in crews.call(CASES + "train", n, args=(setting, mesh, stage, "AdamW", (), tmp_path / "one",
                                                        tmp_path / f"two of {n}")):
            compared(got, wanted)
    last, = crews.call(CASES + "train", 1, args=(setting, {}, 0, "AdamW", (), tmp_path / "two"))
    for n, mesh in (there, here):
        for got in crews.call(CASES + "train", n, args=(setting, mesh, stage, "AdamW", (),
                                                        tmp_path / f"two of {6 - n}")):
            compared(got, last)


def test_the_curve_shows_what_is_wrong(one_process):
    for setting, n, mesh, which in (("as DeepSeek-V3", 4, {"ep": 2, "tp": 2}, [1, 2, 3]),
                                    ("balanced", 2, {"tp": 2}, [1]), ("balanced", 2, {"cp": 2}, [0, 1])):
        for name, got in crews.call(CASES + "train_wrong", n, args=(setting, mesh, which))[0].items():
            with pytest.raises(AssertionError):
                compared(got, one_process(setting))
                pytest.exit(f"{setting}: {name} passes")


@pytest.mark.parametrize(("n", "sizes"), [(2, {"ep": 1, "tp": 2}), (4, {"ep": 2, "tp": 2})])
def test_a_rank_sends_rows_of_its_own_positions(n, sizes):
    """And no sequence is gathered: along tp goes the gradient of the router alone."""
    name = "ep,tp"
    for rank, (sent, rows) in enumerate(crews.call(CASES + "counted", n, args=(sizes,))):
        out, back = (sum(there[:rank] + there[rank + 1:]) for there in (rows[rank], [each[rank] for each in rows]))
        assert sent["forward"] == {(name, "all_to_all"): (3, (n - 1) * 12 // n * 8 + (out + back) * 4 * 8)}
        assert sent["backward"].pop(("tp", "all_reduce"))[0] == 1
        assert sent["backward"] == {(name, "all_to_all"): (2, (out + back) * 4 * 8)}
        assert sum(map(sum, rows)) == n * 2 * 3 * 3      # positions of a rank, and experts for each: nothing twice


@pytest.mark.parametrize(("n", "sizes"), [(2, {"ep": 1, "tp": 2}), (4, {"ep": 2, "tp": 2})])
def test_derivatives_equal_finite_differences_across_ranks(n, sizes):
    assert all(crews.call(CASES + "gradients", n, args=(sizes, 2 if n == 2 else 1)))


def test_what_does_not_go_together_is_said():
    capacity = ("blocks.0.mlp: ranks of 'ep,tp', which divide the experts, share its sequences, and "
                "capacity_factor=2.0: who finds a place depends on tokens that other ranks have: take "
                "capacity_factor=None, or divide the experts over ranks with samples of their own, not 'tp' too")
    said = {
        "a capacity": ("ValueError", capacity), "a capacity, experts first": ("ValueError", capacity),
        "groups of tokens": ("ValueError", "balance=0.3 is of groups of 3 tokens, of which other ranks have some"),
        "a part of the ranks": ("ValueError", "which divide the experts, share sequences with ["),
        "exact": ("ValueError", "exact mode can't be had of experts over 'ep,tp', some of which share sequences: "
                  "divide them over 'ep' alone"),
        "whole sequences": ("ValueError", "for all ranks that have samples, as with mesh['dp', 'ep', 'tp']. (Of "
                            "experts: ranks that share matrices have the same samples"),
        "too few": ("ValueError", "blocks.0.mlp.experts is divided over the ranks of 'ep', which have samples of "),
        "nobody sums": ("RuntimeError", "ExpertParallel: the ranks of 'ep' have samples"),
    }
    for found in crews.call(CASES + "refusals", 4):
        assert found.pop("evaluation") < 1e-12
        assert found.keys() == said.keys()
        for what, (kind, words) in said.items():
            assert found[what][0] == kind and words in found[what][1], (what, found[what])
