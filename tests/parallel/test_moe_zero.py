"""Experts that are divided over ranks, in ZeRO and FSDP: one curve; bytes and memory as closed forms say."""

import functools
import math

import numpy as np
import pytest

from minitorch_dist import optim
from minitorch_dist.flat import BLOCK
from tests.crews import crews

from . import moe_zero_cases as cases
from .moe_zero_cases import EXPERTS, LAYERS, OPTIMIZERS, Way, gpt

CASES = "tests.parallel.moe_zero_cases:"
STEPS = 3
FROZEN = ("blocks.0.mlp.experts.down", "blocks.1.attention.out.weight")
WAYS = {    # ranks: ways
    2: [Way(2, 1), Way(2, 2), Way(2, 3, optimizer="muon")],
    4: [Way(2, 1), Way(2, 2, accumulate=2), Way(2, 3), Way(4, 1), Way(4, 2), Way(4, 3),
        Way(2, 2, over=("ep",), optimizer="muon"), Way(2, 3, ("ep", "dp"), over=("dp",)),
        Way(2, 3, tp=2)],
}


@functools.cache
def one_process(steps, optimizer="adamw", frozen=()):
    """(losses, norms, {name: array})."""
    it = cases.Training(Way(1, 0, optimizer=optimizer, frozen=frozen)).run(steps)
    return it.losses, it.norms, {name: array for name, _, array in it.pieces()}


def furthest(pieces, wanted):
    """The largest difference of [(name, box, values)] from whole arrays, all of which must be there."""
    assert {name for name, *_ in pieces} == set(wanted)
    return max(float(abs(values - wanted[name][tuple(slice(*side) for side in box)]).max())
               for name, box, values in pieces)


@pytest.mark.parametrize("n", WAYS)
def test_one_curve_on_any_mesh_in_any_stage(n):
    """AdamW, and Muon, of clipped gradients, in float64: parameters, losses and norms of one process, on every rank."""
    for way, ranks in zip(WAYS[n], zip(*crews.call(CASES + "curves", n, (WAYS[n], STEPS)), strict=True), strict=True):
        losses, norms, wanted = one_process(STEPS, way.optimizer, way.frozen)
        for rank, (got_losses, got_norms, pieces, full) in enumerate(ranks):
            np.testing.assert_allclose(got_losses, losses, rtol=1e-10, err_msg=str(way))
            np.testing.assert_allclose(got_norms, norms, rtol=1e-10, err_msg=str(way))
            assert furthest(pieces, wanted) < 1e-10, (way, rank)
            if way.tp == 1:
                assert set(full) == (set(wanted) if rank == 0 else set()), way
                assert all(abs(full[name] - wanted[name]).max() < 1e-10 for name in full), way
    assert min(norms) > 0.8


def padded(shapes, ranks):
    """Elements of a unit."""
    used = sum(-(-math.prod(shape) // 16) * 16 for shape in shapes)
    return -(-used // (ranks * BLOCK)) * ranks * BLOCK


def test_bytes_and_memory_are_closed_forms():
    """Experts are cut over the ranks that hold the same, and travel among these; all else over all ranks."""
    ways, dim = [Way(2, 1), Way(2, 3), Way(4, 1), Way(4, 2), Way(4, 3)], 40
    shapes = {name: p.shape for name, p in gpt("f4", dim).named_parameters()}
    rows = [[s for name, s in shapes.items() if name.startswith(f"blocks.{i}.") and "experts" not in name]
            for i in range(LAYERS)]
    rest = [[s for name, s in shapes.items() if not name.startswith("blocks")], *rows]
    stack = [(EXPERTS, dim, 4 * dim), (EXPERTS, 4 * dim, dim)]
    for way, ranks in zip(ways, zip(*crews.call(CASES + "counted", 4, (ways, dim)), strict=True), strict=True):
        alike = 4 // way.ep
        mine = [(count // way.ep, *sides) for count, *sides in stack]
        others, experts = [padded(each, 4) for each in rest], [padded(mine, alike)] * LAYERS
        sent, held = {}, {"parameter": 0, "gradient": 0, "optimizer": 0}
        for among, sizes, n in (("all", others, 4), ("alike", experts, alike)):
            gathers = 2 if way.stage == 3 else 1
            sent[among, "all_gather"] = gathers * 4 * sum(sizes) * (n - 1) // n
            sent[among, "reduce_scatter"] = 4 * sum(sizes) * (n - 1) // n
            for kind, cut_from, each in (("parameter", 3, 4), ("gradient", 2, 4), ("optimizer", 1, 8)):
                held[kind] += each * sum(sizes) // (n if way.stage >= cut_from else 1)
        sent["all", "all_reduce"] = 2 * 4 * len(shapes) * 3 // 4        # who has used what
        for got, live, most, order in ranks:
            assert {key: n for key, n in got.items() if key[0] != "ep"} == {key: n for key, n in sent.items() if n}, way
            # Without others, communicators' arrays are aligned by hand.
            alone = 64 * LAYERS * (alike == 1)
            aligned = {"parameter": alone * (way.stage < 3), "gradient": alone * (way.stage == 1), "optimizer": 0}
            assert {kind: live[kind] - held[kind] for kind in held} == aligned, way
            modules = sorted([others[0], *(a + b for a, b in zip(others[1:], experts, strict=True))])
            assert most == (4 * sum(modules[-2:]) if way.stage == 3 else 0), way
            blocks = [[f"blocks.{i} (experts over {way.ep} ranks)", f"blocks.{i}"] for i in reversed(range(LAYERS))]
            assert order == [*sum(blocks, []), "the rest"], way
    assert {key[1] for key in got if key[0] == "ep"} == {"all_to_all"}


def test_a_checkpoint_goes_on_on_any_mesh(tmp_path):
    ways = [Way(2, 3), Way(4, 1), Way(2, 0), Way(2, 2, over=("ep",)), Way(1, 3)]
    it = cases.Training(Way(1, 0))
    for way, ranks in zip(ways, zip(*crews.call(CASES + "one_after_another", 4, (ways, str(tmp_path))), strict=True),
                          strict=True):
        wanted = {name: array for name, _, array in it.run(1).pieces()}
        for pieces, kept in ranks:
            assert furthest(pieces, wanted) < 1e-10, way
            assert {name: n for name, n in kept.items() if "mlp" in name} == \
                {name: array.size for name, array in wanted.items() if "mlp" in name}, way     # biases: 0, or nearly


@pytest.mark.parametrize("frozen, stages", [((), (3, 1)), (FROZEN, (3, 1)), (FROZEN, (2, 3))])
def test_full_states_know_nothing_of_ranks(frozen, stages):
    """They are a whole model's, and its optimizer's; any other mesh goes on from them."""
    first, second = Way(2, stages[0], frozen=frozen), Way(4, stages[1], frozen=frozen)
    (state, optimizer, *_), *others = found = crews.call(CASES + "full_states", 4, (first, second))
    assert all(each[:2] == ({}, {}) for each in others)
    model = gpt()
    for name, p in model.named_parameters():
        p.requires_grad_(name not in frozen)
    model.load_state_dict(state)
    whole = OPTIMIZERS["adamw"](p for p in model.parameters() if p.requires_grad)
    whole.load_state_dict(optimizer)
    assert isinstance(whole, optim.AdamW) and len(optimizer["state"]) == len(list(model.parameters())) - len(frozen)
    _, _, wanted = one_process(3, frozen=frozen)
    for _, _, pieces, wrong in found:
        assert furthest(pieces, wanted) < 1e-10
        assert "blocks.1.mlp.experts.up has shape (4, 24, 96)" in wrong and "have shape (3, 24, 96)" in wrong


def test_all_ranks_leave_out_a_step_that_one_ranks_experts_spoil():
    for found in crews.call(CASES + "scaled", 4):
        assert found == [(True, False), (False, True)]


def test_what_nobody_uses_has_no_gradient():
    for found in crews.call(CASES + "unused", 4):
        for idle, used in found.values():
            assert idle == ["one.router.weight", "one.experts.up", "one.experts.down"]
            assert used == ["two.router.weight", "two.experts.up", "two.experts.down"]


def test_mixed_precision():
    """Stages have the same bits; their curve is float32's but for rounding."""
    for found in crews.call(CASES + "mixed", 4):
        losses, own, dtype = found.pop(None)
        assert dtype == "float32" and len({each[1] for each in found.values()}) == 1
        for got, digest, dtype in found.values():
            np.testing.assert_allclose(got, losses, rtol=0.02)
            assert got != losses and digest != own and dtype == "bfloat16"


def test_what_cant_be_is_refused_on_all_ranks():
    words = {"exact": "must be divided over neighbours, not over [", "nobody": "nobody sums the gradients",
             "some": "fully_shard: blocks.0.mlp.experts is divided over the ranks of 'ep'",
             "crossed": "no axes of one mesh", "turned": "no axes of one mesh", "copies": "no axes of one mesh",
             "already": "already"}
    for found in crews.call(CASES + "refused", 4):
        assert set(found) == set(words)
        for what, said in found.items():
            assert words[what] in said, (what, said)
