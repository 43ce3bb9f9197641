"""Experts that are divided between ranks are the whole mixture: one curve, and the bytes that fixed capacities say.

As in test_collectives.py only the ranks import minitorch_dist.parallel.collectives.
"""

import numpy as np
import pytest

from tests.crews import crews

CASES = "tests.parallel.moe_cases:"


@pytest.fixture(scope="module")
def one_process():
    """{setting: what training a whole model in one process gives}."""
    return crews.call(CASES + "train_whole", 1)[0]


def furthest(got, wanted):
    """The largest difference between two dictionaries of arrays."""
    assert set(got) == set(wanted)
    return max(abs(got[name] - value).max() for name, value in wanted.items())


@pytest.mark.parametrize(("setting", "n", "size", "accumulate"), [
    ("sequences", 2, 2, 1), ("sequences", 4, 2, 2), ("sequences", 4, 4, 1), ("switch", 2, 2, 1), ("switch", 2, 1, 1),
    ("halves", 2, 2, 1), ("quarters", 4, 2, 1), ("nothing dropped", 2, 2, 1), ("nothing dropped", 4, 2, 1),
    ("no capacity", 1, 1, 1), ("no capacity", 2, 2, 1), ("no capacity", 4, 4, 2), ("no capacity", 3, 1, 1)])
def test_one_curve_on_any_mesh(one_process, setting, n, size, accumulate):
    """A GPT, AdamW, float64: the parameters of one process, within 1e-10, on every rank; where each rank's tokens are a
    group, those of one process that routes them so; where nothing is dropped, those of all experts for all tokens."""
    losses, wanted = one_process[setting]
    for got_losses, got in crews.call(CASES + "train", n, args=(setting, size, False, accumulate)):
        np.testing.assert_allclose(got_losses, losses, rtol=1e-10)
        assert furthest(got, wanted) < 1e-10
    assert losses[-1] < losses[0]


def test_one_curve_beside_tensor_parallelism_and_of_sharded_experts(one_process):
    losses, wanted = one_process["sequences"]
    for n, size, tensor, stage in ((4, 2, 2, 0), (2, 1, 2, 0), (2, 1, 1, 3)):
        found = crews.call(CASES + "train", n, args=("sequences", size, False, 1, None, False, tensor, stage))
        for got_losses, got in found[:1] if stage else found:       # rank 0 gets the whole of what fully_shard cuts
            np.testing.assert_allclose(got_losses, losses, rtol=1e-10)
            assert furthest(got, wanted) < 1e-10


@pytest.mark.parametrize("stage, setting, size", [(0, "sequences", 1), (1, "sequences", 1), (3, "sequences", 1),
                                                  (0, "no capacity", 2), (2, "no capacity", 2)])
def test_a_rank_without_rows_changes_no_curve(stage, setting, size):
    """Of 40 sequences, 13 to a batch, every fourth batch has the one that is left over: the others have none. Divided
    experts answer the others' tokens all the same."""
    def trained(n):
        size_of = size if n > 1 else 1
        return crews.call(CASES + "train", n, args=(setting, size_of, False, 1, None, False, 1, stage * (n > 1), 13))
    [(losses, wanted)], found = trained(1), trained(2 if size == 2 else 3)
    for got_losses, got in found[:1] if stage else found:
        np.testing.assert_allclose(got_losses, losses, rtol=1e-10)
        assert furthest(got, wanted) < 1e-10


def test_the_curve_shows_what_is_wrong(one_process):
    """Each part of it, broken once: another curve by far."""
    found = crews.call(CASES + "train_wrong", 2)[0]
    assert len(found) == 8
    for name, got in found.items():
        assert furthest(got, one_process["halves"][1]) > 1e-3, name


@pytest.mark.parametrize(("n", "amp"), [(2, None), (4, None), (2, "bfloat16"), (2, "float16")])
def test_a_layer_sends_two_all_to_alls_each_way_of_a_size_known_beforehand(n, amp):
    """(n - 1)/n of experts · groups · capacity · size elements each, and nothing else."""
    for sent, nbytes in crews.call(CASES + "counted", n, args=(1.5, amp)):
        assert sent == {"forward": {"all_to_all": (2, 2 * nbytes)}, "backward": {"all_to_all": (2, 2 * nbytes)}}
        assert nbytes == (n - 1) * 4 * 3 * 8 * 6 * (2 if amp else 8) // n       # the capacity: ⌈2 · 1.5 · 10 / 4⌉ = 8


@pytest.mark.parametrize(("n", "amp"), [(2, None), (4, None), (2, "bfloat16")])
def test_without_a_capacity_a_layer_sends_what_is_chosen_and_how_much_that_is(n, amp):
    """To each other rank 8 bytes per expert, and the rows; their answers back; in backward both again. The ranks bring
    unequal numbers of tokens."""
    for sent, out, back in crews.call(CASES + "counted", n, args=(None, amp)):
        assert sent == {"forward": {"all_to_all": (3, (n - 1) * 4 * 8 // n + out + back)},
                        "backward": {"all_to_all": (2, out + back)}}


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("factor", [1.5, None])
def test_rows_go_to_the_experts_in_few_bits(n, factor):
    """As in one process whose experts get rows, and their answers gradients, that are rounded so. Of the all-to-alls
    two send 8 codes and a scale of 8 bytes for each row of 8, and two 64 bytes."""
    for far, sent, capacity in crews.call(CASES + "short_dispatch", n, args=(factor,)):
        assert max(far) < 1e-12
        if factor:
            rows = (n - 1) * 4 * 3 * capacity // n
            assert sent == [rows * (16 + 64)] * 2


def test_a_training_with_rows_of_few_bits_stays_near():
    """From the second step on some tokens choose other experts."""
    for losses in crews.call(CASES + "short_training", 2):
        away = {bits: abs(np.subtract(losses[bits], losses[None])) for bits in (8, 4)}
        assert all(0 < each[0] < 5e-4 and each.max() < 0.05 for each in away.values()), away


def test_few_bits_are_of_divided_experts_and_whole_blocks():
    (said, sizes), = crews.call(CASES + "short_refusals", 1)
    assert sizes == [64, 128, 128] and len(said) == 2
    assert "there are no divided experts here" in said[0]
    assert "rows of 192 features aren't made of blocks of 128" in said[1]


@pytest.mark.parametrize(("n", "order"), [(2, 2), (3, 1)])
def test_derivatives_equal_finite_differences_across_ranks(n, order):
    assert all(crews.call(CASES + "gradients", n, args=(order,)))


def test_checkpoint_sends_the_tokens_again():
    assert all(crews.call(CASES + "checkpointed", 2))


def test_checkpoints_hold_whole_experts(tmp_path):
    assert all(crews.call(CASES + "saved", 2, args=(str(tmp_path),)))


@pytest.mark.parametrize(("pp", "size", "schedule"), [(2, 1, ("1f1b", 4)), (2, 2, ("1f1b", 4)),
                                                      (1, 2, ("dualpipev", 3)), (2, 2, ("dualpipev", 5, 10)),
                                                      (2, 2, ("zb-h1", 4, 8, None)),
                                                      (2, 2, ("dualpipev", 5, 10, None))], ids=str)
def test_a_pipeline_carries_the_auxiliary_loss_along(pp, size, schedule):
    """And in DualPipeV messages to experts are under way in two passes at once."""
    (wanted, _), = crews.call(CASES + "pipelined", 1, args=(1, 1, "1f1b", 4, *schedule[2:]))
    found = crews.call(CASES + "pipelined", pp * size, args=(pp, size, *schedule))
    for got, _ in found:
        assert furthest(got, wanted) < 1e-10
    assert any(together for _, together in found) == (schedule[0] == "dualpipev")


def test_what_would_be_another_curve_raises():
    expected = {
        "three": ("ValueError", "2 ranks of 'ep' can't share 3 experts equally"),
        "dp alone": ("ValueError", "blocks.0.mlp.experts is divided over the ranks of 'ep'"),
        "nobody": ("RuntimeError", "nobody sums the gradients"),
        "first layer": ("RuntimeError", "nobody sums the gradients"),
        "any number": ("RuntimeError", "nobody sums the gradients"),
        "fsdp": ("ValueError", "fully_shard: blocks.0.mlp.experts is divided over the ranks of 'ep'"),
        "join": ("RuntimeError", "can't answer the others' tokens"),
        "cut twice": ("ValueError", "are divided already"),
        "sequence": ("ValueError", "'experts' are cut over an axis of their own"),
        "on parts": ("TypeError", "is a MoE, which looks at several positions at once"),
        "mlp": ("TypeError", "mlp is a FeedForward; 'experts' cuts a MoE"),
        "tensor parallel": ("ValueError", "of 16 along axis 0"), "no gradients": None, "evaluated": None,
        "no rows": None,
    }
    for found in crews.call(CASES + "errors", 2):
        assert found.pop("plans") == ({}, {"1": "experts"})
        assert set(found) == set(expected)
        for name, said in expected.items():
            if said is None:
                assert found[name] is None, found[name]
            else:
                assert found[name] is not None, f"{name}: accepted"
                assert found[name][0] == said[0] and said[1] in found[name][1], found[name]


def test_unequal_numbers_of_tokens_raise_on_all_ranks():
    for kind, said in crews.call(CASES + "uneven", 2):
        assert kind == "MismatchError" and "all_to_all" in said
