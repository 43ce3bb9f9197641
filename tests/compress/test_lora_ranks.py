"""Adapters on ranks: one process's curve, the bytes of the adapters alone, and no rank that waits for nothing."""

import functools

import numpy as np
import pytest

from minitorch_dist import checkpoints, comm, optim
from minitorch_dist.compress import lora
from minitorch_dist.flat import ALIGN, BLOCK, round_up
from tests.crews import crews, threads

from . import lora_cases as cases
from .lora_cases import RANK, WIDTHS, WRAPPERS

CASES = "tests.compress.lora_cases:"
PAIRS = list(zip(WIDTHS, WIDTHS[1:], strict=False))
TRAINED = [RANK * (inside + out) for inside, out in PAIRS]
AT_THE_END = 2 * 8          # train_step's sum of losses, and whether to stop, in float64


@functools.cache
def alone(name, *args):
    return crews.call(CASES + name, 1, args, env=threads(1))[0]


def compare(found, wanted, tolerance=1e-12):
    """tolerance 0: bits."""
    assert set(found) == set(wanted)
    for name, values in wanted.items():
        np.testing.assert_allclose(found[name].astype("f8"), values.astype("f8"), rtol=0, atol=tolerance, err_msg=name)


# ---------------------------------------------------------------- data parallelism

def frozen(quantize):
    """[bytes of a unit] of what is frozen, on two ranks: weights and biases, or NF4's codes, scales, and biases."""
    found = []
    for inside, out in PAIRS:
        blocks = -(-inside * out // 64)
        found += [(8, (inside * out, out))] if quantize is None else \
            [(1, (32 * blocks, blocks)), (4, (-(-blocks // 256), 1)), (8, (out,))]
    return [width * round_up(sum(round_up(size, ALIGN) for size in sizes), 2 * ALIGN) for width, sizes in found]


def test_wrapped_models_are_one_process_and_send_the_adapters():
    """To the byte: buckets and trained units are of adapters alone, padded to blocks of 4,096; frozen weights are in
    none, but are gathered in stage 3, twice where backward wants them."""
    two, one = crews.call(CASES + "wrapped", 2), alone("wrapped")
    units = sum(round_up(size, 2 * BLOCK) for size in TRAINED)      # each layer's adapter
    for (name, quantize), (state, sent, held) in two[0].items():
        compare(state, one[name, quantize][0])
        used = 4 * 2 * len(TRAINED)       # of ZeRO: how many ranks have used each parameter, int32
        if name == "DDP":
            assert sent == {"all_reduce": 8 * round_up(sum(TRAINED), BLOCK) + AT_THE_END}
            assert held == round_up(sum(TRAINED), BLOCK)
            continue
        gathered = 2 if name == "ZeRO 3" else 1
        cut = frozen(quantize) if name == "ZeRO 3" else [0]
        # The first layer's input has no gradient, for which backward would want weights; a bias it wants never.
        once = (sum(cut[:2]) + sum(cut[2::3]) if quantize else cut[0]) * (name == "ZeRO 3")
        assert sent["reduce_scatter"] == 8 * units / 2
        assert sent["all_gather"] == (gathered * (8 * units + sum(cut)) - once) / 2, name
        assert 0 <= sent["all_reduce"] - used - AT_THE_END < 100 and held == units / 2      # a norm, too
    assert {name for name, _ in two[0]} == set(WRAPPERS)


def test_exact_mode_has_the_bits_of_one_process():
    wanted = alone("exactly", ("DDP",))["DDP"]
    for state in crews.call(CASES + "exactly", 4, (("DDP", "ZeRO 1", "ZeRO 3"),))[0].values():
        compare(state, wanted, 0)


# ---------------------------------------------------------------- pipelines

JOBS = [(("0",), "1f1b", None, {"scaled": True}), (("6",), "zb_h1", "DDP", {}),
        (("2",), "1f1b", "DDP", {"exact": True}), (("0", "6"), "zb_h1", "ZeRO 3", {"exact": True}),
        (("6",), "1f1b", "ZeRO 2", {"scaled": True})]


@pytest.mark.parametrize("n", [2, 4])
def test_stages_without_anything_to_train_keep_nobody_waiting(n):
    for job, *states in zip(JOBS, *crews.call(CASES + "pipelines", n, (JOBS,), limit=60), strict=True):
        targets, *_, options = job
        exact = options.get("exact", False)
        for state in states:
            compare(state, alone("one_process", targets, exact), 0 if exact else 1e-12)


def test_on_gpus_a_stage_without_anything_to_train_knows_where_the_others_look_for_inf():
    for state in crews.call(CASES + "staged_on_gpu", 2):
        compare(state, alone("one_process", ("0",), False), 1e-12)


# ---------------------------------------------------------------- tensor parallelism

@pytest.mark.parametrize("n", [2, 3])
def test_parts_are_the_whole_and_send_no_more_activations(n):
    """Whose A or B is whole has its gradient summed, as all else is; forward sends nothing more."""
    (wanted, *_), _ = alone("parts")[0]
    for ((state, forward, backward), (_, forward_without, backward_without)), said in crews.call(CASES + "parts", n):
        compare(state, wanted)
        whole = sum(RANK * (out if number % 2 else inside) for number, (inside, out) in enumerate(PAIRS))
        assert forward == forward_without
        assert backward - backward_without == pytest.approx(2 * (n - 1) / n * 8 * whole, abs=8 * 2 * n * len(PAIRS))
        for text, words in zip(said, ("lora.merge: 0, 2, 4, 6: cut", "these adapters are cut over the ranks",
                                      "quantize='nf4' has blocks of 64", "0 is a LoRALinear; 'column' cuts a Linear",
                                      "attention.qkv is a LoRALinear; 'heads' cuts Linears",
                                      "the model is, or belongs to, a wrapper", "add adapters first, then wrap"),
                               strict=True):
            assert words in text


@pytest.mark.parametrize(("kind", "how"), [(False, "ring"), (True, "ring"), ("regather", "ring"), (False, "all_to_all"),
                                           (True, "all_to_all")])
def test_dropout_beside_sequence_parallelism_is_one_process_s(kind, how):
    """And context parallelism: of sequences that are gathered again for backward, as one matrix, too."""
    for divided, whole in crews.call(CASES + "of_sequences", 4, (kind, how)):
        moved = [name for name in whole if "lora" in name and np.abs(whole[name]).max() > 1e-4]
        assert len(moved) == 8
        compare(divided, whole)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("axis", ["cp", "tp"])
def test_a_router_s_adapter_drops_by_positions(axis, first):
    """Of a router, which gets rows, where a rank has, or routes, some positions alone."""
    for divided, whole in crews.call(CASES + "of_routers", 2, ({axis: 2}, first)):
        assert len(whole) == 4 and min(np.abs(grad).max() for grad in whole.values()) > 1e-4
        compare(divided, whole)


# ---------------------------------------------------------------- checkpoints

def test_saved_by_one_form_and_gone_on_by_another(tmp_path):
    (state, *_, kept), (_, merged, inputs, _) = crews.call(CASES + "saved", 2, (str(tmp_path),))
    m = cases.model()
    optimizer = cases.sgd(lora.parameters(m))
    for number in range(2):
        cases.one_step(m, optimizer, number)
    compare(state, m.state_dict())
    np.testing.assert_allclose(merged, m(inputs).numpy(), rtol=1e-10, atol=1e-12)
    other = lora.add(cases.plain(), RANK, 5, targets="*")
    optimizer = optim.SGD(lora.parameters(other), 0.5, momentum=0.9)
    checkpoints.load(tmp_path / "adapters", lora.Adapters(other), optimizer, comm.world_of_one())
    compare(other.state_dict(), kept, 0)


def test_a_stage_without_attention_knows_whose_part_of_the_sequences_it_has():
    """Its adapters' dropout is that of these positions."""
    for whole, parts in crews.call(CASES + "stage_without_attention", 2):
        np.testing.assert_allclose(parts, whole, rtol=0, atol=1e-12)
