"""Packed documents on several ranks: the curve of one process that runs each document alone."""

import numpy as np
import pytest

import minitorch_dist as mt
from tests.crews import crews, threads

from . import packing_cases

CASES = "tests.parallel.packing_cases:"
WANTED = {}


def wanted(family):
    if family not in WANTED:
        WANTED[family] = crews.call(CASES + "one_by_one", 1, args=(family,))[0]
    return WANTED[family]


FORMS = {
    "one process": (1, {}), "DDP": (2, {}), "DDP, accumulate": (2, {"accumulate": 3}),
    "ZeRO 1": (2, {"stage": 1}), "ZeRO 2": (2, {"stage": 2}), "ZeRO 3": (2, {"stage": 3}),
    "tensor": (2, {"sizes": {"tp": 2}}), "sequence": (2, {"sizes": {"tp": 2}, "sequence": True}),
    "regather": (2, {"sizes": {"tp": 2}, "sequence": "regather"}),
    "ring": (2, {"sizes": {"cp": 2}}), "all-to-all": (2, {"sizes": {"cp": 2}, "how": "all_to_all"}),
    "ring, tensor, ZeRO 3": (4, {"sizes": {"cp": 2, "tp": 2}, "stage": 3}),
    "ring, DDP": (4, {"sizes": {"cp": 2}}),
}


OF_POSITIONS = ("one process", "sequence", "ring", "all-to-all")      # which a llama tells otherwise


@pytest.mark.parametrize("family, form", [("gpt", form) for form in FORMS] + [("llama", form) for form in OF_POSITIONS])
def test_one_curve(family, form):
    n, options = FORMS[form]
    losses, parameters = wanted(family)
    for found, state in crews.call(CASES + "train", n, (family, options)):
        np.testing.assert_allclose(found, losses, rtol=0, atol=1e-10)
        assert state.keys() == parameters.keys()
        for name, value in state.items():
            np.testing.assert_allclose(value, parameters[name], rtol=0, atol=1e-10)


@pytest.mark.parametrize("options", [{}, {"stage": 3}], ids=["DDP", "ZeRO 3"])
def test_exact_mode_has_the_same_bits_on_any_ranks(options):
    options = options | {"exact": True, "dropout": 0.2}
    (losses, state), = crews.call(CASES + "train", 1, ("gpt", options), env=threads(1))
    for n in (2, 4):
        for found, other in crews.call(CASES + "train", n, ("gpt", options)):
            assert found == losses
            assert all((other[name] == value).all() for name, value in state.items())


@pytest.mark.parametrize("n", [2, 4])
def test_annotated_it_is_the_same(n):
    (loss, state), = crews.call(CASES + "annotated", 1, ("llama",))
    for found, other in crews.call(CASES + "annotated", n, ("llama",)):
        assert abs(found - loss) < 1e-10
        for name, value in state.items():
            np.testing.assert_allclose(other[name], value, rtol=0, atol=1e-10)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize("n, layout, how", [(2, "zigzag", "ring"), (3, "contiguous", "ring"),
                                            (2, "zigzag", "all_to_all")])
def test_a_ring_with_documents_is_attention_with_documents(n, layout, how, causal):
    """Values, gradients and tangents, of numbers that don't stand side by side."""
    q, k, v, u, documents = packing_cases.arrays(n, 6 * n)

    def attention(*x):
        return mt.scaled_dot_product_attention(*x, is_causal=causal, documents=documents)
    y, pull = mt.vjp(attention, q, k, v)
    wanted = [y, *pull(u), mt.jvp(attention, (q, k, v), (q, k, v))[1]]
    for found in crews.call(CASES + "ring", n, (layout, causal, how)):
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)


def test_products_without_a_document_in_common_are_left_out():
    """8 chunks on 4 ranks, of which 36 pairs are causal. With two chunks to a document, 3 each are left; with one, 8.
    What is sent stays the same."""
    every = crews.call(CASES + "blocks", 4, (None,))
    for documents, pairs in (([0, 0, 1, 1, 2, 2, 3, 3], 12), (range(8), 8), ([5] * 8, 36), ([0, 1] * 4, 20)):
        found = crews.call(CASES + "blocks", 4, (list(documents),))
        assert sum(products for products, _ in found) == pairs
        for (_, sent), (_, usual) in zip(found, every, strict=True):
            assert sent == usual
    assert sum(products for products, _ in every) == 36


def test_ranks_with_other_documents_are_told_everywhere():
    for told in crews.call(CASES + "disagreeing", 2):
        assert "MismatchError" in told and "documents" in told


def test_a_pipeline_refuses_packed_rows_on_all_ranks():
    """Before anything is sent: plain rows are trained on afterwards."""
    for (told,), loss in crews.call(CASES + "in_a_pipeline", 2):
        assert "are packed rows" in told and "fully_shard" in told
        assert np.isfinite(loss)
