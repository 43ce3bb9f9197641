"""Packed rows: every pair of a token and the next stands in one place, nothing is cut in vain, and rows are full."""

import re
from pathlib import Path

import numpy as np
import pytest

from minitorch_dist import data, nn
from minitorch_dist.data import Loader
from minitorch_dist.data.packing import PADDING, apart, concatenate, pack
from minitorch_dist.data.text import IGNORED


def documents(count, mean=2.5, seed=0):
    """Of unequal lengths; the tokens say which document and which place: 1000 · number + place."""
    lengths = np.random.default_rng(seed).lognormal(mean, 0.8, count).astype(int) + 1
    return [1000 * i + np.arange(n) for i, n in enumerate(lengths)]


def pieces(packed):
    """[(tokens, targets)] of each stretch of a document."""
    return [(row[numbers == n], targets[numbers == n])
            for row, numbers, targets in zip(packed.inputs, packed.documents, packed.targets, strict=True)
            for n in np.unique(numbers[numbers != PADDING])]


@pytest.mark.parametrize("way", [pack, concatenate])
@pytest.mark.parametrize("length", [1, 7, 20, 64])
def test_each_pair_of_a_document_stands_in_one_place(way, length):
    texts = documents(120)
    packed = way(texts, length)
    found = pieces(packed)
    for tokens, targets in found:
        assert (targets == tokens + 1).all()        # of the same document
        assert (np.diff(tokens) == 1).all()
    np.testing.assert_array_equal(np.sort(np.concatenate([tokens for tokens, _ in found])),
                                  np.concatenate([text[:-1] for text in texts]))
    padding = packed.documents == PADDING
    assert (packed.inputs[padding] == 0).all() and (packed.targets[padding] == IGNORED).all()
    assert (packed.targets[~padding] != IGNORED).all()
    for numbers in packed.documents:        # 0, 1, 2, …, in this order, and padding behind them
        changes = numbers[np.flatnonzero(np.diff(numbers, prepend=-9))].tolist()
        padded = [PADDING] if numbers[-1] == PADDING else []
        assert changes == [*range(len(changes) - len(padded)), *padded]
    assert packed.padding == padding.mean()
    assert packed.units == (~padding).sum() / len(padding)


@pytest.mark.parametrize("way", [pack, concatenate])
def test_a_length_may_be_numpy_s(way):
    texts = documents(60, 4.0)
    for kind in (np.int64, np.uint8):
        np.testing.assert_array_equal(way(texts, kind(200)).rows, way(texts, 200).rows)


def test_only_what_is_longer_than_a_row_is_cut():
    texts = documents(300)
    for length in (16, 40):
        longer = sum(len(text) - 1 > length for text in texts)
        packed, plain = pack(texts, length), concatenate(texts, length)
        assert packed.whole == plain.whole == sum(len(text) > 1 for text in texts)
        assert packed.cut == longer < plain.cut
        full = sum((len(text) - 1) // length for text in texts)
        assert sum(len(tokens) == length for tokens, _ in pieces(packed)) == full     # cut into full rows and a rest
        assert len(plain.rows) <= len(packed.rows)
    ends = np.cumsum([len(text) - 1 for text in texts])       # by hand: a border inside of a document
    cut = sum(any(start < border < end for border in range(0, end, 40))
              for start, end in zip([0, *ends], ends, strict=False))
    assert plain.cut == cut and plain.padding * plain.targets.size == -ends[-1] % 40


def naive(sizes, length):
    """Best fit, the longest first, as one says it: the rows' lists of sizes."""
    rows = []
    for size in sorted(sizes, reverse=True):
        fitting = [row for row in rows if sum(row) + size <= length]
        if fitting:
            max(fitting, key=sum).append(size)
        else:
            rows.append([size])
    return rows


@pytest.mark.parametrize("seed", range(4))
def test_it_is_best_fit_decreasing(seed):
    texts = documents(80, seed=seed)
    sizes = [size for text in texts for size in [30] * ((len(text) - 1) // 30) + [(len(text) - 1) % 30] if size]
    packed = pack(texts, 30)
    rows = [np.unique(numbers[numbers != PADDING], return_counts=True)[1].tolist() for numbers in packed.documents]
    assert sorted(rows) == sorted(naive(sizes, 30))


def test_a_row_is_filled_as_the_page_says():
    texts = [np.arange(n + 1) for n in (7, 3, 4, 2)]
    assert pack(texts, 5).documents.tolist() == [
        [0] * 5, [0] * 4 + [-1], [0, 0, 0, 1, 1], [0, 0, -1, -1, -1]]
    packed = concatenate(texts, 5)
    assert packed.documents.tolist() == [[0] * 5, [0, 0, 1, 1, 1], [0, 0, 0, 0, 1], [0, -1, -1, -1, -1]]
    assert str(packed) == "4 rows of 5, 20.0 % padding; 2 of 4 documents cut (50.0 %)"


def test_a_loader_shards_rows_with_their_documents():
    packed = pack(documents(60), 16)
    (whole, *_), *parts = ([*Loader(packed.rows, packed.targets, 8, rank=rank, size=size).epoch(0)]
                           for rank, size in ((0, 1), (0, 2), (1, 2)))
    joined = np.concatenate([batches[0].inputs for batches in parts])
    np.testing.assert_array_equal(joined, whole.inputs)
    tokens, numbers = apart(whole.inputs)
    targets = whole.labels
    inside = (numbers[:, 1:] == numbers[:, :-1]) & (numbers[:, 1:] != PADDING)
    assert inside.any() and (tokens[:, 1:][inside] == targets[:, :-1][inside]).all()


def test_documents_of_one_token_are_left_out_and_nothing_is_refused():
    packed = pack([np.array([3]), np.array([], np.int64), np.array([1, 2], np.int32)], 4)
    assert packed.whole == 1 and packed.inputs.tolist() == [[1, 0, 0, 0]] and packed.inputs.dtype == np.int64
    with pytest.raises(ValueError, match="none of 1 documents has two tokens"):
        pack([np.array([3])], 4)
    with pytest.raises(ValueError, match="rows of length=0"):
        concatenate([np.arange(3)], 0)
    for bad in (np.ones(3), np.ones((2, 2), int)):
        with pytest.raises(ValueError, match=r"document 1 is .*a document is integers \(time,\)"):
            pack([np.arange(3), bad], 4)


def test_the_guide_s_example_runs_and_prints_what_it_says(capsys):
    page = (Path(__file__).parents[2] / "docs/guide.md").read_text(encoding="utf-8")
    block = re.search(r"## Packed documents.*?```python\n(.*?)```", page, re.DOTALL)[1]
    names = {"np": np, "data": data, "nn": nn}
    exec(block, names)
    assert re.search(r"print\(packed\) +# (.*)\n", block)[1] == capsys.readouterr().out.strip()
    assert 0 < names["loss"].item() < 10


def test_documents_without_a_token_and_rows_of_padding():
    packed = pack([np.array([], int), np.array([1, 2, 3]), []], 4)
    assert packed.whole == 1 and packed.targets.tolist() == [[2, 3, IGNORED, IGNORED]]
    with pytest.raises(TypeError, match=r"length=2\.5: must be a whole number"):
        pack([[1, 2, 3]], 2.5)
    rows = np.zeros((2, 4, 2), np.int64)
    rows[..., 1] = PADDING
    rows[0] = packed.rows[0]
    targets = np.array([*packed.targets, [IGNORED] * 4])
    gpt = nn.GPT(5, 4, layers=1, heads=2, dim=4)
    both, alone = (nn.cross_entropy(gpt(*apart(rows[:n])), targets[:n], reduction="sum") for n in (2, 1))
    assert both.item() == pytest.approx(alone.item(), rel=1e-6)
    both.backward()
    assert all(np.isfinite(p.grad.numpy()).all() for p in gpt.parameters())
    with pytest.raises(ValueError, match="or where all labels are ignored"):
        nn.cross_entropy(gpt(*apart(rows[1:])), targets[1:])
