"""Flash attention of several documents: what no query of a block can see is never loaded, let alone multiplied."""

from itertools import product

import numpy as np
import pytest

from minitorch_dist import kernels
from minitorch_dist.autodiff.ops.attention import ALL, CAUSAL
from minitorch_dist.kernels import attention_programs
from minitorch_dist.kernels import flash_attention as module

from .harness import random
from .samples.flash_attention import with_blocks

pytestmark = pytest.mark.skipif(not kernels.interpreting(), reason="Triton compiles in this process")
BLOCK = 16
INNER = ("_attend", "_pull_queries", "_pull_sources")       # a block of queries with a block of sources


def passes(documents, band):
    """o and all gradients of attention in blocks of 16, forward and backward."""
    shape = 1, 1, 5 * BLOCK if documents is None else documents.shape[1], 16
    q, k, v, ct = (random(*shape, seed=i) for i in range(4))

    def run(q, k, v, ct):
        o, kept = with_blocks(module.flash_attention, BLOCK, BLOCK)(q, k, v, band, 0.3, documents)
        gradient = with_blocks(module.flash_attention_gradient, BLOCK, BLOCK)
        return o, *gradient(ct, q, k, v, band, 0.3, kept, documents)
    return run, (q, k, v, ct)


class Pair(tuple):
    """Two arrays of numbers that are the same."""

    def __new__(cls, numbers):
        return super().__new__(cls, (numbers, numbers))

    @property
    def shape(self):
        return self[0].shape


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("numbers, pairs", [        # of the blocks; how many pairs see each other, causal and not
    ([0, 0, 1, 1, 2], (3 + 3 + 1, 4 + 4 + 1)), ([3, 2, 1, 0], (4, 4)), ([7] * 4, (10, 16)), ([0, 1, 0], (5, 7))])
def test_only_blocks_that_see_each_other_are_multiplied(numbers, pairs, causal, monkeypatch):
    """Where a document doesn't stand side by side, its blocks walk over what is between, too."""
    documents = Pair(np.repeat(numbers, BLOCK)[None])
    assert multiplied(monkeypatch, documents, CAUSAL if causal else ALL) == pairs[not causal]


@pytest.mark.parametrize("band, pairs", [       # of 5 blocks of 16; (17, 0): a block's first query sees two before it
    ((0, 0), 5), ((1, 0), 9), ((16, 0), 9), ((17, 0), 12), ((0, 1), 9), ((1, 1), 13), ((31, 0), 12), ((None, 5), 19),
    ((-16, 20), 7), ((-80, 90), 0), ((-64, None), 1)])
def test_only_blocks_of_the_band_are_multiplied(band, pairs, monkeypatch):
    assert multiplied(monkeypatch, Pair(np.zeros((1, 5 * BLOCK), np.int64)), band) == pairs
    monkeypatch.undo()
    assert multiplied(monkeypatch, None, band) == pairs


def test_only_what_is_of_the_band_and_of_the_document_is_multiplied(monkeypatch):
    assert multiplied(monkeypatch, Pair(np.repeat([0, 0, 0, 1, 1], BLOCK)[None]), (17, 0)) == 1 + 2 + 3 + 1 + 2


def multiplied(monkeypatch, documents, band):
    """How many pairs of blocks each pass multiplies of five blocks, or of those of the documents."""
    counts = dict.fromkeys(INNER, 0)

    def counting(name, inner):
        def counted(*args, **options):
            counts[name] += 1
            return inner(*args, **options)
        return counted
    for name in INNER:
        monkeypatch.setattr(attention_programs, name, counting(name, getattr(attention_programs, name)))
    run, arrays = passes(documents, band)
    run(*arrays)
    (count,) = set(counts.values())
    return count


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_what_others_hold_is_never_read():
    documents = Pair(np.repeat([3, 1, 1, 2], BLOCK)[None])
    run, arrays = passes(documents, ALL)
    wanted = run(*arrays)
    mine = documents[0][0] == 1
    for array in arrays:
        array[:, :, ~mine] = np.nan
    for got, whole in zip(run(*arrays), wanted, strict=True):
        np.testing.assert_array_equal(got[:, :, mine], whole[:, :, mine])
        assert np.isnan(got[:, :, ~mine]).all()


def test_options_are_measured_for_documents_for_a_band_and_without_and_for_each_precision(monkeypatch):
    asked = []
    monkeypatch.setattr(module, "best", lambda kernel, sizes, like, run: asked.append((kernel.name, *sizes)))
    q = random(1, 2, 5, 4)
    numbers = np.zeros((1, 5), np.int64)
    for documents, band, precision in product((None, (numbers, numbers)), (CAUSAL, (2, 0)), ("ieee", "tf32x3")):
        _, kept = module.flash_attention(q, q, q, band, 0.3, documents, precision)
        module.flash_attention_gradient(q, q, q, q, band, 0.3, kept, documents, precision)
    assert len(set(asked)) == 24 and asked[:3] == [(kernel.name, 2, 5, 5, 4) for kernel in module.KERNELS]
