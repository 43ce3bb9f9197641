"""Sequence parallelism is tensor parallelism with less kept: the same model, the same bytes sent, by the ledger.

As in test_collectives.py only the ranks import minitorch_dist.parallel.collectives.
"""

import numpy as np
import pytest

from minitorch_dist.testing import ranks
from tests.crews import crews

CASES, USE = "tests.parallel.sequence_cases:", "tests.parallel.sequence_use_cases:"
BATCH, TIME, DIM, HEADS = 2, 12, 16, 4
WHOLE = BATCH * TIME * DIM * 8      # bytes of one activation of whole sequences


@pytest.fixture(scope="module")
def one_process():
    """{setting: what training a whole model in one process gives}."""
    return crews.call(CASES + "train_whole", 1)[0]


def furthest(got, wanted):
    """The largest difference between two dictionaries of arrays."""
    assert set(got) == set(wanted)
    return max(abs(got[name] - value).max() for name, value in wanted.items())


@pytest.mark.parametrize(("setting", "n", "kind"), [
    ("tied", 2, True), ("tied", 4, True), ("tied", 2, "regather"), ("rotary, untied", 4, "regather"),
    ("rotary, untied", 2, True), ("logits stay apart", 2, True)])
def test_one_curve(one_process, setting, n, kind):
    """tp=2, alone or beside dp=2: AdamW, dropout, clipping, float64, within 1e-10 of one process, on every rank."""
    losses, wanted, _ = one_process[setting]
    for got_losses, got, _ in crews.call(CASES + "train", n, args=(setting, 2, kind)):
        np.testing.assert_allclose(got_losses, losses, rtol=1e-10)
        assert furthest(got, wanted) < 1e-10


def test_the_curve_shows_what_is_wrong(one_process):
    """Each part of it, broken once: another curve by far, or an error."""
    found = crews.call(CASES + "train_wrong", 2, args=("tied",))[0]
    assert len(found) == 8
    for name, got in found.items():
        assert got == "ValueError" or furthest(got, one_process["tied"][1]) > 1e-3, name


def test_mixtures_route_whole_sequences():
    """With dropout and choices that are dropped; alone, beside dp or ep, by DistributedDataParallel or fully_shard."""
    wanted, = crews.call(CASES + "train_mixture", 1, args=(1,))
    for n, *args in ((2, 2, 1, True), (2, 2, 1, "regather"), (4, 2, 1, True), (4, 2, 2, True),
                     (4, 2, 2, "regather", 3)):
        found = crews.call(CASES + "train_mixture", n, args=args)
        for got in found[:2] if args[3:] else found:
            assert furthest(got, wanted) < 1e-10, args
    wrong = crews.call(CASES + "train_wrong_mixtures", 2)[0]
    assert len(wrong) == 3
    for name, got in wrong.items():
        assert furthest(got, wanted) > 1e-3, name


@pytest.mark.parametrize("n", [1, 2, 3])
def test_derivatives_equal_finite_differences_across_ranks_to_second_order(n):
    for passed in crews.call(CASES + "gradients", n):
        assert len(passed) == 6


@pytest.mark.parametrize("kind", [True, "regather"])
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("case", ["through_block", "through_own", "through_mixture"])
def test_modules_of_parts_are_the_whole_modules(case, n, kind):
    """Every gradient, those of norms and biases and of modules that only the plan knows (with dropout) included."""
    y, dx, grads = crews.call(CASES + case, 1, args=(None,))[0]
    for got_y, got_dx, got_grads in crews.call(CASES + case, n, args=(kind,)):
        np.testing.assert_allclose(got_y, y, rtol=0, atol=1e-11)
        np.testing.assert_allclose(got_dx, dx, rtol=0, atol=1e-11)
        assert furthest(got_grads, grads) < 1e-11


@pytest.mark.parametrize("n", [2, 4])
def test_a_block_sends_what_two_all_reduces_each_way_do(n):
    """Two all-gathers and two reduce-scatters, (n - 1)/n of the output each, forward and backward; besides, backward
    sums the gradients of two norms (weight and bias) and two biases. "regather" gathers twice more."""
    plain = crews.call(CASES + "counted", n, args=(False,))[0]
    each = 2, 2 * (n - 1) * WHOLE // n
    small = 6, 6 * 2 * (n - 1) * DIM * 8 // n
    for found in crews.call(CASES + "counted", n, args=(True,)):
        assert found == {"forward": {"all_gather": each, "reduce_scatter": each},
                         "backward": {"all_gather": each, "reduce_scatter": each, "all_reduce": small}}
        for way in ("forward", "backward"):
            assert found[way]["all_gather"][1] + found[way]["reduce_scatter"][1] == plain[way]["all_reduce"][1]
    for found in crews.call(CASES + "counted", n, args=("regather",)):
        assert found["backward"] == {"all_gather": (4, 2 * each[1]), "reduce_scatter": each, "all_reduce": small}


@pytest.mark.parametrize("n", [2, 4])
def test_activations_kept_are_divided(n):
    """Between the parts: by n, all of them. Of a whole block: what tensor parallelism divides already, plus these; the
    gathered inputs of the two column-parallel layers are whole, but with "regather" all that a block keeps is 1/n."""
    whole = crews.call(CASES + "kept", 1, args=(None,))[0]
    plain, between = (crews.call(CASES + case, n, args=(False,))[0] for case in ("kept", "kept_between"))
    norm, mask = WHOLE + BATCH * TIME * 8, WHOLE        # x̂ and 1/σ per position; what x is multiplied by
    assert between == {"norm1": norm, "norm2": norm, "dropout": mask}
    for found in crews.call(CASES + "kept_between", n, args=(True,)):
        assert found == {name: nbytes // n for name, nbytes in between.items()}
    gathered, inputs = 2 * WHOLE, WHOLE     # (norms keep their inputs, too; that of norm1 is x, no activation)
    for found in crews.call(CASES + "kept", n, args=(True,)):
        assert found == whole // n + gathered * (n - 1) // n
        assert found == plain - (2 * norm + inputs + 2 * mask) * (n - 1) // n
    for found in crews.call(CASES + "kept", n, args=("regather",)):
        assert found == whole // n


def test_it_goes_with_the_rest_of_the_library():
    """Checkpointing, hooks of the user's on what is kept, evaluation, names and states."""
    for found in crews.call(USE + "composed", 2):
        assert len(found) == 11 and all(found.values()), found


def test_the_weights_of_attention_are_those_of_whole_sequences():
    whole = crews.call(USE + "whole_weights", 1)[0]
    parts = crews.call(USE + "weights", 2)
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, rtol=0, atol=1e-13)


def test_memory_that_is_used_again_raises_no_alarm():
    w = np.random.default_rng([15]).standard_normal((5, 4))
    for grad in crews.call(USE + "memory_used_again", 2):
        np.testing.assert_allclose(grad, np.broadcast_to(2 * w.sum(0), grad.shape), rtol=1e-13)


def test_on_a_gpu_it_is_what_it_is_on_the_host():
    for results in ranks.call(USE + "on_a_gpu", 2):
        for host, gpu in (results[:2], results[2:]):
            assert len(host) == len(gpu) > 20
            for a, b in zip(host, gpu, strict=True):
                np.testing.assert_allclose(b, a, rtol=0, atol=1e-12)


def test_accumulated_gradients_are_those_of_one_pass():
    assert max(crews.call(USE + "accumulated", 2)) < 1e-12


def test_it_goes_with_fully_shard():
    for plain, *others in crews.call(USE + "sharded", 4):
        for found in others:
            for got, wanted in zip(found, plain, strict=True):
                np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-11)


def test_errors_say_what_to_do():
    length = "2 ranks can't share 5 positions equally: pad the sequences to 6, or cut them to 4"
    expected = {
        "length": ("ValueError", length), "generate": ("ValueError", length),
        "short": ("ValueError", "1 positions equally: pad the sequences to 2"),
        "positions": ("ValueError", "2 ranks can't share 3 positions"),
        "positions of documents": ("ValueError", length),
        "axes": ("ValueError", "shape (4, 16); sequence parallelism is for (batch, time, dim)"),
        "dropout's axes": ("ValueError", "shape (4, 16)"), "sum's axes": ("ValueError", "shape (4, 16)"),
        "left out": ("ValueError", "blocks.1.mlp.0, blocks.1.mlp.2 would get a part of the sequence"),
        "own modules": ("ValueError", "extra.0, extra.2, extra.3 would get a part"),
        "own parameter": ("ValueError", "the model itself would get a part"),
        "mixing": ("TypeError", "block can't be 'sequence': block is a TransformerBlock"),
        "own dropout": ("ValueError", "blocks.0.dropout, of class Noisy, is a Dropout of its own making"),
        "nested": ("ValueError", "block.mlp and block.mlp.0, block.mlp.2 inside of it both stand in the plan"),
        "a mixture alone": ("ValueError", "the model itself would get a part"),
        "no mixture": ("TypeError", "extra is a Sequential; 'whole sequences' cuts a MoE"),
        "whole without": ("ValueError", "'0': 'whole sequences' needs sequence_parallel=True"),
        "mixture's axes": ("ValueError", "shape (3, 4); sequence parallelism is for (batch, time, dim)"),
        "way": ("ValueError", "'norm': 'sequence' needs sequence_parallel=True"),
        "kind": ("ValueError", "sequence_parallel='twice' must be one of False, True, 'regather'"),
        "row": ("ValueError", "input_is_parallel=False can't be had"),
        "overwritten": ("RuntimeError", "in-place assignment has overwritten this rank's part of shape (2, 3, 4)"),
    }
    for found in crews.call(USE + "errors", 2):
        assert set(found) == set(expected)
        for name, (kind, words) in expected.items():
            assert found[name] is not None, f"{name}: accepted"
            assert found[name][0] == kind and words in found[name][1], found[name]
