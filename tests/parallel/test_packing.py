"""Packed documents on several ranks: the curve of one process that runs each document alone."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import nn
from minitorch_dist.parallel.pipelines.documents import Stage, blind, takes_documents
from minitorch_dist.parallel.pipelines.messages import SPEC_BYTES
from tests.crews import crews, threads

from . import packing_cases

CASES = "tests.parallel.packing_cases:"
WANTED = {}
TILED = {"loss": packing_cases.tiled_loss_sum}


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
    "by tiles, DDP": (2, TILED), "by tiles, ZeRO 3": (2, {"stage": 3} | TILED),
    "by tiles, ring": (2, {"sizes": {"cp": 2}} | TILED),
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


@pytest.mark.parametrize("options", [{}, {"stage": 3}, TILED], ids=["DDP", "ZeRO 3", "by tiles"])
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


@pytest.mark.parametrize("family", packing_cases.OPTIONS)
def test_annotated_on_a_gpu_it_is_the_same(family):
    """Documents, positions and masks are where the parts are."""
    (loss, state), = crews.call(CASES + "annotated", 1, (family,))
    for found, other in crews.call(CASES + "annotated_on_gpu", 2, (family,)):
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


STAGED = {
    "1F1B": (2, ("1f1b", 3)), "interleaved": (2, ("interleaved", 4)), "ZB-V, recompute": (
        2, ("zb-v", 5, None, 0, False, True)),
    "ZB-H1, DDP": (4, ("zb-h1", 3)), "V-Min, ZeRO 3": (4, ("v-min", 3, None, 3)),
    "1F1B, ring": (4, ("1f1b", 3, {"cp": 2})), "GPipe, ZeRO 1": (4, ("gpipe", 2, None, 1)),
    "DualPipeV, tensor": (4, ("dualpipev", 5, {"tp": 2})),
}


@pytest.mark.parametrize("form", STAGED)
def test_the_curve_of_a_pipeline(form):
    """Layers with attention, rotary positions and a table of positions: that of each document alone. What goes over a
    boundary between ranks: once what it looks like, then of each row 16 positions of 8 float64, there and back."""
    n, arguments = STAGED[form]
    losses, parameters = wanted("layers")
    ranks = crews.call(CASES + "staged", n, arguments)
    for found, state, *_ in ranks:
        np.testing.assert_allclose(found, losses, rtol=0, atol=1e-10)
        assert state.keys() == parameters.keys()
        for name, value in state.items():
            np.testing.assert_allclose(value, parameters[name], rtol=0, atol=1e-10)
    sent, rows = sum(rank[2] for rank in ranks), ranks[0][3]
    boundaries = {"interleaved": 3, "zb-v": 2, "v-min": 2, "dualpipev": 2}.get(arguments[0], 1)
    copies = 2 if "tensor" in form else 1
    assert sent == boundaries * (n // 2 * SPEC_BYTES + 2 * copies * rows * 16 * 8 * 8)


@pytest.mark.parametrize("n, arguments", [(2, ("1f1b", 4)), (4, ("zb-v", 2))], ids=str)
def test_the_bits_of_a_pipeline(n, arguments):
    """Exact mode, with dropout: one process's."""
    one, = crews.call(CASES + "staged", 1, ("1f1b", 4, {"pp": 1}, 0, True), env=threads(1))
    for losses, state, *_ in crews.call(CASES + "staged", n, (*arguments, None, 0, True)):
        assert losses == one[0] and state.keys() == one[1].keys()
        assert all((value == one[1][name]).all() for name, value in state.items())


def test_ranks_of_a_pipeline_mean_the_same_rows():
    """Or all of them get an error, before anything is sent."""
    words = {"not said": ("ValueError", "are packed rows", "packed=True"),
             "said by one": ("MismatchError", "packed rows, documents (8, 16)", "are packed rows, and attention"),
             "other documents": ("MismatchError", "packed rows, documents (8, 16), crc32"),
             "malformed on one": ("MismatchError", "documents (8, 16)", "rows of shape (8, 16, 1)"),
             "plain on one": ("MismatchError", "documents (8, 16)", "inputs (8, 16) with packed=True"),
             "said by one, and nobody takes documents": ("MismatchError", "plain rows", "no stage of this pipeline"),
             "other rows": ("MismatchError", "rows 0 to 4 of 8, plain", "rows 4 to 8 of 8, plain"),
             "floats": ("TypeError", "documents of dtype float64"),
             "hidden": ("MismatchError", "1, of class Sequential, takes no documents")}
    for found in crews.call(CASES + "differing", 2):
        assert np.isfinite(found.pop("plain")) and found.keys() == words.keys()
        for what, (kind, *parts) in words.items():
            assert found[what].startswith(kind) and all(part in found[what] for part in parts), found[what]


def test_who_takes_documents():
    """Wrappers by what they hand them on to; a layer as the second argument, by which it gets them."""
    class Any(nn.Module):
        def forward(self, *inputs):
            return inputs[0]

    class Second(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = nn.Sequential(nn.Tanh(), nn.MultiHeadAttention(8, 2))     # its own affair

        def forward(self, x, documents=None):
            return x

    class Third(nn.Module):
        def forward(self, x, mask=None, documents=None):
            return x

    class Named(nn.Module):
        def forward(self, x, *, documents=None):
            return x
    for module, takes, first in ((Any(), False, None), (Second(), True, None), (nn.Sequential(Second()), True, None),
                                 (Third(), False, "the stage, of class Third"), (Named(), False, "the stage, of class"),
                                 (Stage(nn.Sequential(Any(), Second())), True, "0, of class Sequential"),
                                 (Stage(Second(), Any(), Third()), True, "2, of class Third")):
        found = blind(module)
        assert takes_documents(module) == takes and (found is None) == (first is None)
        assert first is None or found.startswith(first)


def test_a_pipeline_where_nobody_takes_documents():
    for told, loss in crews.call(CASES + "nobody_asks", 2):
        assert "no stage of this pipeline takes documents" in told and np.isfinite(loss)
