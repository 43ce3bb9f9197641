"""Layers that tensor parallelism has cut, in few bits: what each rank rounds is what one process rounds."""

import functools

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import comm
from minitorch_dist.compress.formats import E4M3
from minitorch_dist.compress.low_precision import Cut, Operand, products
from minitorch_dist.testing import ranks
from tests.crews import crews
from tests.device.fake_cupy import installed

from . import low_precision_cases as cases
from .low_precision_cases import BATCH, IN, KINDS, OUT, RECIPE, TIME

CASES = "tests.compress.low_precision_cases:"
TOKENS = BATCH * TIME


@pytest.mark.parametrize("n", [1, 2, 3])
def test_rounded_parts_have_the_bits_of_the_whole(n):
    """In shares, in runs, unequal and empty ones; ranks talk where a group is on several, and there alone."""
    assert crews.call(CASES + "operands", n) == [[]] * n


@pytest.mark.parametrize("n", [2, 3])
def test_a_layer_of_parts_is_the_whole_one(n):
    seen = crews.call(CASES + "layers", n)
    assert {kind for _, kind in seen[0]} == set(KINDS)
    for name, kind in seen[0]:
        wanted, _ = cases.through(name, kind, whole=True)
        for found, _ in (rank[name, kind] for rank in seen):
            assert set(found) == {"y", "dx", "dweight", "dbias"}
            for what, value in wanted.items():
                off = np.abs(found[what] - value).max()
                assert off <= 1e-14 * np.abs(value).max(), (name, kind, what, off)
                # Sums of products of few bits with scales of powers of two are exact in float64, in whatever order.
                if name in ("rowwise", "mxfp8", "mxfp4") and what != "dbias":
                    assert np.array_equal(found[what], value), (kind, what)


def test_what_is_sent_for_scales():
    """Numbers forward and backward: at most one all-reduce each, of numbers of 8 bytes; two ranks send each once."""
    numbers = {("tensorwise", "column"): (1, 3), ("rowwise", "column"): (0, TOKENS + IN),
               ("tensorwise", "row"): (2, 2), ("rowwise", "row"): (TOKENS + OUT, 0),
               ("blockwise", "row"): (TOKENS + 1, 1), ("blockwise", "column"): (1, TOKENS + 1),
               ("mxfp4", "row"): (TOKENS + OUT, 0), ("mxfp4", "column"): (0, TOKENS + IN),
               # one more for each operand, its largest of all
               ("nvfp4", "row"): (TOKENS + 1 + 2, 1 + 2), ("nvfp4", "column"): (1 + 1, TOKENS + 1 + 3)}
    for seen in crews.call(CASES + "layers", 2):
        for pair, (forward, backward) in numbers.items():
            sums = {"column": (0, TOKENS * IN), "row": (TOKENS * OUT, 0)}[pair[1]]
            for found, of_scales, of_sums in zip(seen[pair][1], (forward, backward), sums, strict=True):
                calls, sent = found.get("all_reduce", (0, 0))
                assert (calls, sent) == ((of_scales > 0) + (of_sums > 0), 8 * (of_scales + of_sums)), pair


def test_blocks_that_lie_inside_of_ranks_need_no_messages():
    """A row-parallel layer makes its sum, a column-parallel one nothing but backward's, which isn't asked for. A scale
    of all asks for tensorwise's numbers: 2 in each of two forwards and 2 backward, or 1 and 3; of float32."""
    assert crews.call(CASES + "aligned", 2, ("blockwise",)) == [[{"all_reduce": (1, 60)}, {}]] * 2
    assert crews.call(CASES + "aligned", 2, ("nvfp4",)) == [[{"all_reduce": (4, 60 + 4 * 6)},
                                                             {"all_reduce": (3, 4 * 5)}]] * 2


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_what_is_not_finite_on_one_rank_is_so_on_all(bad):
    for found in crews.call(CASES + "not_finite", 2, (bad,)):
        for name in RECIPE:
            some, every = found[name]
            all_share = name == "tensorwise" or RECIPE[name].scale == "e4m3"
            assert some == every == ([True] * 4 if all_share else [False, True, False, False]), name


@functools.cache
def trained(kind, recipe="rowwise"):
    """By rank."""
    return crews.call(CASES + "trained", 2, (kind, recipe))


@pytest.mark.parametrize("kind, recipe", [(False, "rowwise"), (True, "rowwise"), ("regather", "rowwise"),
                                          ("regather", "nvfp4")])
def test_a_transformer_trains_as_in_one_process(kind, recipe):
    wanted, _, _ = cases.trained(None, recipe)
    plain, _, _ = cases.trained(None, "tensorwise")
    for found, _, text in trained(kind, recipe):
        assert text.count("products of ") == 4 and "LowPrecisionLinear" not in text
        for name, value in wanted.items():
            np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-10, err_msg=name)
    assert any(np.abs(plain[name] - wanted[name]).max() > 1e-5 for name in wanted)


def test_sequences_that_are_gathered_again_are_not_kept():
    """As much less as without few bits: half of two columns' x at least, of (32, 24) float64."""
    kept = {(kind, recipe): trained(kind, recipe)[0][1] for kind in (True, "regather") for recipe in ("rowwise", None)}
    less = kept[True, "rowwise"] - kept["regather", "rowwise"]
    assert less == kept[True, None] - kept["regather", None] >= 2 * 16 * 24 * 8


def test_parts_on_a_gpu_have_the_bits_of_the_host():
    """The stand-in's, of columns in another order."""
    x, w, order = cases.wide((5, 23), 6), cases.wide((4, 23), 7), np.random.default_rng(1).permutation(23)
    forms = (E4M3, (1, 4), "e8m0"), (E4M3, (3, 4), "e8m0")
    here, = products([tuple(Operand(a, *form) for a, form in zip((x, w), forms, strict=True))])
    with installed():
        cuts = None, Cut(comm.world(), [order])
        there, = products([tuple(Operand(mt.tensor(a[:, order], device="cuda").data, *form, cuts)
                                 for a, form in zip((x, w), forms, strict=True))])
        assert not isinstance(there, np.ndarray)
        assert np.array_equal(mt.tensor(there).cpu().numpy(), here)


def test_under_autocast_products_give_16_bits():
    """And sums over ranks float32, with few bits as without."""
    column, row = ["bfloat16", "float32", "float32"], ["float32"] * 3
    assert crews.call(CASES + "in_16_bits", 2) == crews.call(CASES + "in_16_bits", 2, (False,)) == [[column, row]] * 2


def test_a_rank_that_is_alone_in_it_is_told():
    assert ranks.call(CASES + "chosen_by_one", 2) == ["MismatchError"] * 2
