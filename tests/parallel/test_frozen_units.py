"""Stage 3 cuts what is frozen, too: one process's curve, 1/N of the bytes at rest, two gathers a step and no sums."""

import functools
import re
from collections import defaultdict

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import comm, nn
from minitorch_dist.autodiff.saved import owner_of
from minitorch_dist.flat import ALIGN, BLOCK, round_up
from minitorch_dist.parallel import DistributedDataParallel, fully_shard
from minitorch_dist.parallel.local_sgd.fragments import fragments_of
from tests.crews import crews, threads

from . import frozen_cases as cases

CASES = "tests.parallel.frozen_cases:"


@functools.cache
def alone(kind):
    return cases.alone(kind)


def close(got, wanted, tolerance=1e-10):
    assert set(got) == set(wanted)
    for name, value in wanted.items():
        assert got[name].dtype == value.dtype
        np.testing.assert_allclose(got[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


def same_curve(seen, kind):
    for rank, (losses, norms, state) in enumerate(seen):
        wanted_losses, wanted_norms, wanted = alone(kind)
        np.testing.assert_allclose(losses, wanted_losses, rtol=1e-10)
        np.testing.assert_allclose(norms, wanted_norms, rtol=1e-10)
        if rank == 0:
            close(state, wanted)


# ---------------------------------------------------------------- one curve

JOBS = {1: [("QLoRA", "3")], 4: [("LoRA", "3"), ("QLoRA", "3, kept")],
        2: [(kind, "3") for kind in cases.KINDS] + [("first block", "3, kept")]}


@pytest.mark.parametrize("n", list(JOBS))
def test_one_curve(n):
    """Adapters everywhere, in one block only; rank 0's values, whatever the others had."""
    everyone = crews.call(CASES + "curves", n, (JOBS[n],))
    for (kind, _), *seen in zip(JOBS[n], *everyone, strict=True):
        same_curve(seen, kind)


def test_one_curve_of_copies_over_pairs_of_ranks():
    same_curve(crews.call(CASES + "hybrid", 4), "QLoRA")


def test_exact_mode_has_one_set_of_bits():
    kinds = ["LoRA", "QLoRA"]
    wanted = crews.call(CASES + "exact_curves", 1, (kinds, ["ddp"]), env=threads(1))[0]
    for rank, seen in enumerate(crews.call(CASES + "exact_curves", 4, (kinds, ["3"]))):
        for kind in kinds:
            losses, norms, digest = wanted[kind, "ddp"]
            assert seen[kind, "3"] == (losses, norms, {} if rank else digest)


# ---------------------------------------------------------------- counted

def units_on_paper(quantize, n, targets=None):
    """{(its block or "", whether it is trained, dtype): bytes} of all units, by hand: a unit is of a block, or of the
    rest, and of one dtype, and is frozen or trained."""
    sizes = defaultdict(int)
    for name, p in cases.wide(quantize, 120, targets).named_parameters():
        place = re.match(r"blocks\.\d|", name)[0]
        sizes[place, p.requires_grad, p.dtype] += round_up(p.size, ALIGN)
    return {(place, trained, dtype): n * round_up(-(-size // n), BLOCK if trained else ALIGN) * dtype.itemsize
            for (place, trained, dtype), size in sizes.items()}


def paper(quantize, n):
    """({whether it is trained: bytes of all units}, those of the two largest blocks and the rest)."""
    total, of_place = {True: 0, False: 0}, defaultdict(int)
    for (place, trained, _), whole in units_on_paper(quantize, n).items():
        total[trained] += whole
        of_place[place] += whole
    rest = of_place.pop("")
    return total, rest + sum(sorted(of_place.values())[-2:])


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_what_a_step_sends_and_a_rank_holds(quantize, n):
    total, alive = paper(quantize, n)
    frozen = sum(p.data.nbytes for p in cases.wide(quantize, 120).parameters() if not p.requires_grad)
    for seen in crews.call(CASES + "counted", n, (quantize, "3")):
        assert seen["sent"]["all_gather"] == 2 * (total[True] + total[False]) * (n - 1) // n
        assert seen["sent"]["reduce_scatter"] == total[True] * (n - 1) // n
        assert set(seen["calls"]) == {"all_gather", "reduce_scatter", "all_reduce"}
        assert seen["held"] == seen["live"]["parameter"] == (total[True] + total[False]) // n
        assert seen["held"] < 1.1 * frozen / n + total[True] // n
        assert seen["live"]["gradient"] == total[True] // n and seen["live"]["buffer"] == 0
        assert seen["peak"]["buffer"] <= alive
        assert seen["absent"] and seen["alive"] == [] and seen["gone"][0] == seen["gone"][1]


@pytest.mark.parametrize("block, how", [(2, "none"), (1, "none"), (1, "inside")])
def test_what_lies_below_all_that_is_trained_is_gathered_for_forward_alone(block, how):
    """Backward ends at the lowest adapter: it wants nothing of the blocks below, and nothing of them travels."""
    targets = [f"blocks.{block}.*.qkv", f"blocks.{block}.mlp.?"]
    units = units_on_paper(None, 2, targets)
    forward = sum(units.values())
    backward = sum(whole for (place, _, _), whole in units.items() if place[-1:] >= str(block))
    backward += units["", False, np.dtype("f4")]
    for seen in crews.call(CASES + "counted", 2, (None, "3", targets, how)):
        assert seen["sent"]["all_gather"] == (forward + backward) // 2
        assert seen["alive"] == []


@functools.cache
def counted_checkpoints(n, ways=tuple(cases.CHECKPOINTS), quantize=None, targets=None):
    return crews.call(CASES + "counted_checkpoints", n, (ways, quantize, targets and list(targets), n // 2))


@pytest.mark.parametrize("arguments", [(2,), (2, ("none", "inside", "around two"), None, ("blocks.1.*.qkv",)),
                                       (4, ("none", "inside"), "nf4")], ids=str)
def test_a_checkpointed_block_is_gathered_twice(arguments):
    """In forward, and to be run again and come back at once; the rest around it for all of them together. Of 4 ranks
    each two have a copy. It leaves the bits that it would have left without checkpoints."""
    quantize, targets = (*arguments[2:], None, None)[:2]
    units, of_place = units_on_paper(quantize, 2, targets), defaultdict(int)
    for (place, _, _), whole in units.items():
        of_place[place] += whole
    rest, total = of_place.pop(""), sum(units.values())
    blocks = sorted(of_place.values())
    for seen in counted_checkpoints(*arguments):
        for how, it in seen.items():
            below = of_place["blocks.0"] if targets and how != "around two" else 0      # which run again together
            assert it["sent"]["all_gather"] == 2 * (2 * total - below) // 2, how
            beside = sum(blocks[-2:] if how == "around two" else blocks[-1:])
            assert it["peak"]["buffer"] <= max(rest + beside, sum(blocks[-2:]) if how == "none" else 0), how
            assert it["alive"] == [] and it["live"]["buffer"] == 0 and it["bits"] == seen["none"]["bits"]


def test_when_units_of_checkpointed_blocks_are_gathered():
    """A block's two units, the trained one first; the rest before all of them, in forward and in backward."""
    def units(*blocks):
        return ["the rest, frozen", *(name for k in blocks for name in (f"blocks.{k}", f"blocks.{k}, frozen"))]
    forward = units(0, 1, 2)
    for seen in counted_checkpoints(2):
        for how in ("none", "inside", "saving", "around"):
            assert seen[how]["gathered"] == (forward + units(2, 1, 0)) * 2, how
        # Those of two are run in their order, and come back in the other.
        assert seen["around two"]["gathered"] == (forward + units(2, 0, 1)) * 2


def test_orders_are_those_of_the_last_forward():
    """Forwards that no backward follows leave nothing behind, of the whole model and of modules by themselves."""
    model = fully_shard(cases.checkpointed(cases.wide(None), "inside"), comm.world_of_one())
    x, lengths = cases.batch(0)[0], []
    for forward in (lambda: model(x), lambda: [block(np.ones((2, 6, 76), "f4")) for block in model.module.blocks]):
        for _ in range(3):
            forward()
            lengths.append((len(model.values.entered), len(model.values.needed)))
    assert lengths == [(4, 4)] * 3 + [(1, 0)] * 3       # the blocks', the rest's before and behind them


def test_values_that_are_kept_are_gathered_once_and_those_of_stage_1_stay():
    total, _ = paper("nf4", 2)
    frozen = sum(owner_of(p.data).nbytes for p in cases.wide("nf4", 120).parameters() if not p.requires_grad)
    for seen in crews.call(CASES + "counted", 2, ("nf4", "3, kept")):
        assert seen["sent"]["all_gather"] == (total[True] + total[False]) // 2
        assert seen["alive"] == [] and seen["live"]["buffer"] == 0
    for seen in crews.call(CASES + "counted", 2, ("nf4", "1")):
        assert seen["sent"]["all_gather"] == total[True] // 2 and not seen["absent"]
        assert seen["live"]["parameter"] == total[True] + frozen


def test_modules_without_anything_to_train_are_units_too():
    """Which nobody trains: they are no fragments of DiLoCo's."""
    alone = comm.world_of_one()
    module = cases.adapted("last block", cases.MODELS["gpt"](np.dtype("f4")))
    model = fully_shard(module, alone)
    assert [unit.name for unit in model.units] == [
        "blocks.1", "the rest, frozen", "blocks.0, frozen", "blocks.1 (float32), frozen", "blocks.1 (uint8), frozen"]
    assert [[name for name, _ in fragment] for fragment in fragments_of(model, 1, "sequential")] == \
        [["blocks.1.mlp.2.lora_A", "blocks.1.mlp.2.lora_B"]]
    with pytest.raises(ValueError, match="of a model of 1 units"):
        fragments_of(model, 2, "sequential")


# ---------------------------------------------------------------- states

def test_states_are_those_of_one_process():
    module = cases.adapted("QLoRA", cases.MODELS["gpt"](np.dtype("f8")))
    wanted = module.state_dict()
    changed = cases.other_values(wanted)
    assert all(n.endswith("mean") or not np.array_equal(changed[n], wanted[n]) for n in wanted)
    for rank, found in enumerate(crews.call(CASES + "states", 2)):
        for first, second, inside in found.values():
            close(inside, changed, 0)
            close(first, {} if rank else wanted, 0)
            close(second, {} if rank else changed, 0)


@pytest.mark.parametrize("saved, n, loaded, m", [("3", 4, "3", 2), ("3", 2, "ddp", 1), ("ddp", 2, "3", 2)])
def test_checkpoints_go_from_any_form_to_any(tmp_path, saved, n, loaded, m):
    first = crews.call(CASES + "save", n, (str(tmp_path / "here"), saved))[0]
    close(crews.call(CASES + "load", m, (str(tmp_path / "here"), loaded))[0], first)


def test_the_optimizer_has_nothing_of_them():
    model = cases.adapted("LoRA", cases.MODELS["gpt"](np.dtype("f8")))
    shapes = [p.shape for p in model.parameters() if p.requires_grad]
    first, second = crews.call(CASES + "optimizer_states", 2)
    assert [set(arrays.values()) for arrays in first] == [{shape} for shape in shapes] and second is None


# ---------------------------------------------------------------- other forms of parallelism

def test_parts_of_matrices_are_cut_again():
    losses, _, wanted = alone("LoRA")
    for rank, (got, state) in enumerate(crews.call(CASES + "with_tensor_parallelism", 4)):
        np.testing.assert_allclose(got, losses, rtol=1e-9)
        close(state, wanted if rank < 2 else {}, 1e-9)


def test_a_pipelines_stages():
    wanted = cases.with_pipeline(0)
    for state in crews.call(CASES + "with_pipeline", 4, (2,)):
        close(state, wanted)


# ---------------------------------------------------------------- dtypes, and what is refused

@pytest.mark.parametrize("n", [1, 3])
def test_every_dtype_travels(n):
    for rank, (whole, cut, same) in enumerate(crews.call(CASES + "tables", n)):
        assert whole == cut and same is (None if rank else True)


def test_a_policy_leaves_them_as_they_are():
    """Codes and their scales above all; in every stage alike."""
    for found in crews.call(CASES + "policies", 2):
        assert found[1][0] == found[2][0] == found[3][0]
        np.testing.assert_allclose([norms for _, norms, _ in found.values()], found[1][1][0], rtol=1e-5)
        for _, _, dtypes in found.values():
            assert dtypes == {name: "bfloat16" if p.requires_grad else str(p.dtype)
                              for name, p in cases.wide("nf4").named_parameters()}


def test_what_is_refused():
    for found in crews.call(CASES + "refused", 2):
        assert "blocks.1.mlp.0.weight.codes is cut over the ranks" in found["codes"]
        assert "blocks.1.mlp.0.bias is cut over the ranks" in found["bias"]
        assert "norm.weight is cut over the ranks" in found["whole"]
        assert "backward needs the parameters of blocks.1 (float32), frozen as they were in forward" in found["written"]
        for name in ("thawed", "piece thawed"):
            assert "norm.weight: frozen when the model was wrapped, and wants a gradient now" in found[name]


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_that_freeze_others_are_told(stage):
    for said in crews.call(CASES + "frozen_on_one_rank", 2, (stage,)):
        assert said.startswith("RuntimeError: fully_shard: weight of parameters() is frozen on some ranks")


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_frozen_between_two_steps_has_no_gradients_made_or_sent(stage, exact):
    """And is trained again when it is no longer."""
    for (values, norms, sent, made, unused), (wanted, alone, *_) in crews.call(CASES + "frozen_later", 2,
                                                                               (stage, exact))[:1]:
        for name, value in wanted.items():
            np.testing.assert_allclose(values[name], value, rtol=0, atol=1e-12, err_msg=name)
        np.testing.assert_allclose(norms, alone, rtol=1e-12)
        assert made == [[True] * 3, [False] * 3, [False] * 3, [True] * 3] and unused == [[]] * 4
        assert sent[0] == sent[3] and sent[1] == sent[2] == sent[0] * 2 // 3     # one unit of three, and no part of one


@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_written_in_place_to_the_frozen_is_there(stage):
    """By p *= 0.5 of a piece, too, which for what isn't a leaf would bind the name p to another tensor."""
    for rank, ((output, values), (wanted, whole)) in enumerate(crews.call(CASES + "written_in_place", 2, (stage,))):
        np.testing.assert_allclose(output, wanted, rtol=1e-12)
        close(values, {} if rank else whole)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_frozen_between_forward_and_backward(stage):
    """The others' gradients are as ever; of two forwards, too, of which the second has found it frozen."""
    wrap = functools.partial(fully_shard, stage=stage) if stage else DistributedDataParallel

    def gradients(wrap, forwards):
        mt.manual_seed(1)
        model = wrap(nn.Sequential(nn.Linear(3, 4, dtype="f8"), nn.Tanh(), nn.Linear(4, 2, dtype="f8")))
        x, frozen, losses = np.linspace(-1, 1, 6).reshape(2, 3), dict(model.named_parameters())["0.weight"], []
        for _ in range(forwards):
            losses.append((model(x) ** 2).sum())
            frozen.requires_grad_(False)
        sum(losses).backward()
        return {name: p.grad.numpy().ravel() for name, p in model.named_parameters() if p is not frozen}
    for forwards in (1, 2):
        wanted = gradients(lambda module: module, forwards)
        for name, grad in gradients(wrap, forwards).items():
            np.testing.assert_allclose(grad, wanted[name], rtol=1e-12, err_msg=name)
