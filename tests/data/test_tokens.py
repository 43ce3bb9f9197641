"""Tokens on disk: what is written is read, row by row; nothing else is read; what is damaged is told by name."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitorch_dist.data import Loader, StoredTokens, TokenWriter, packing
from minitorch_dist.data.text import IGNORED, Bytes
from tests.parallel.test_offload import file_size_limit


def written(folder, documents, end=None, **options):
    with TokenWriter(folder, **options) as writer:
        for document in documents:
            writer.add(document, end)
    return folder


@settings(deadline=None, max_examples=40)
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=12), shard=st.integers(1, 90), length=st.integers(1, 17),
       dtype=st.sampled_from(["uint16", "uint32", "int32", "int64"]))
def test_rows_are_the_files_in_pieces(tmp_path_factory, sizes, shard, length, dtype):
    folder = tmp_path_factory.mktemp("tokens")
    rng = np.random.default_rng(sum(sizes))
    documents = [rng.integers(0, 60_000, n) for n in sizes]
    written(folder / "it", documents, dtype=dtype, shard=shard)
    files = [np.load(path) for path in sorted((folder / "it").glob("*"))]
    assert all(file.dtype == dtype for file in files)
    if sum(sizes):
        np.testing.assert_array_equal(np.concatenate(files), np.concatenate(documents))
    rows = [file[i:i + length + 1] for file in files for i in range(0, len(file) - length, length)]
    if not rows:
        with pytest.raises((ValueError, FileNotFoundError), match="no row|no files"):
            StoredTokens(folder / "it", length)
        return
    stored = StoredTokens(folder / "it", length)
    assert len(stored) == len(rows) and stored.tokens == sum(sizes)
    asked = rng.integers(0, len(rows), 9)
    inputs, targets = stored.read(asked)
    assert inputs.dtype == targets.dtype == np.int64 and inputs.flags.c_contiguous and targets.flags.c_contiguous
    np.testing.assert_array_equal(inputs, [rows[i][:-1] for i in asked])
    np.testing.assert_array_equal(targets, [rows[i][1:] for i in asked])
    assert stored.read_bytes == 9 * (length + 1) * np.dtype(dtype).itemsize


def test_a_document_stands_in_one_file(tmp_path):
    written(tmp_path, [np.full(n, n) for n in (5, 6, 30, 1, 2)], shard=10)
    assert [np.load(path).tolist() for path in sorted(tmp_path.glob("*"))] == [[5] * 5 + [6] * 6, [30] * 30, [1, 2, 2]]


def test_rows_of_documents_are_packed_rows(tmp_path):
    a, b, c = [1, 2, 3], [4, 5, 6, 7, 8], [9]
    written(tmp_path, [a, b, c], end=0)
    inputs, targets = StoredTokens(tmp_path, 4, end=0).read([0, 1])
    tokens, documents = packing.apart(inputs)
    assert tokens.tolist() == [[1, 2, 3, 0], [4, 5, 6, 7]] and documents.tolist() == [[0, 0, 0, 0], [0, 0, 0, 0]]
    assert targets.tolist() == [[2, 3, 0, IGNORED], [5, 6, 7, 8]]
    inputs, targets = StoredTokens(tmp_path, 11, end=0).read([0])
    assert inputs[0, :, 1].tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2]
    assert targets.tolist() == [[2, 3, 0, IGNORED, 5, 6, 7, 8, 0, IGNORED, 0]]


def test_such_rows_give_a_gpt_the_losses_of_the_documents_alone(tmp_path):
    from minitorch_dist import nn
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, 20, n) for n in (5, 11, 3, 9)]
    written(tmp_path, documents, end=0)
    total = sum(map(len, documents)) + len(documents)
    inputs, targets = StoredTokens(tmp_path, total - 1, vocabulary=20, end=0).read([0])
    model = nn.GPT(20, 40, 2, 2, 8, dtype=np.float64)
    together = nn.cross_entropy(model(*packing.apart(inputs)), targets, reduction="sum").item()
    alone = sum(nn.cross_entropy(model(whole[None, :-1]), whole[None, 1:], reduction="sum").item()
                for whole in (np.append(document, 0) for document in documents))
    assert together == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize("shuffle", [True, "computed"])
def test_ranks_read_their_own_rows_and_together_all(tmp_path, shuffle):
    written(tmp_path, [np.arange(101), np.arange(101, 203)], shard=100)
    alone = Loader(StoredTokens(tmp_path, 7), None, 5, seed=1, shuffle=shuffle)
    stored = [StoredTokens(tmp_path, 7) for _ in range(3)]
    ranks = [Loader(each, None, 5, seed=1, shuffle=shuffle, rank=r, size=3) for r, each in enumerate(stored)]
    for whole, *parts in zip(*(loader.epoch(1, start=2) for loader in (alone, *ranks)), strict=True):
        np.testing.assert_array_equal(whole.inputs, np.concatenate([part.inputs for part in parts]))
        np.testing.assert_array_equal(whole.labels, np.concatenate([part.labels for part in parts]))
        np.testing.assert_array_equal(whole.labels, whole.inputs + 1)
    rows = len(stored[0])
    assert rows == 28 and sum(each.read_bytes for each in stored) == (rows - 2 * 5) * 8 * 2


def test_a_token_that_the_vocabulary_lacks_is_named(tmp_path):
    written(tmp_path, [np.array([1, 2, 3, 4, 5, 6, 300, 7, 8, 9, 10, 11])])
    stored = StoredTokens(tmp_path, 3, vocabulary=257)
    stored.read([0])
    with pytest.raises(ValueError, match=r"00000.npy has token 300 at place 6, and the vocabulary has 0 to 256"):
        stored.read([0, 2])
    np.save(tmp_path / "00000.npy", np.array([1, 2, -1, 3]))
    with pytest.raises(ValueError, match="has token -1 at place 2"):
        StoredTokens(tmp_path, 3, vocabulary=257).read([0])


def test_files_that_are_none_or_damaged_are_named(tmp_path):
    path = written(tmp_path / "x", [np.arange(50)]) / "00000.npy"
    good = path.read_bytes()
    path.write_bytes(good[:-3])
    with pytest.raises(ValueError, match=r"00000.npy is cut short: 225 bytes, and 50 tokens of uint16 take 228"):
        StoredTokens(path, 4)
    path.write_bytes(good + b"abc")
    with pytest.raises(ValueError, match="is too long"):
        StoredTokens(path, 4)
    for content in (b"", b"ab", good[:20], np.arange(9, dtype=np.uint16).tobytes(), good.replace(b"}", b" "),
                    good.replace(b"<u2", b",u2")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"00000.npy is no .npy file .*np.fromfile"):
            StoredTokens(path, 4)
    for other in (np.zeros((3, 4), int), np.zeros(9), np.array([{}])):
        np.save(path, other, allow_pickle=True)
        with pytest.raises(ValueError, match=f"holds {other.dtype}"):
            StoredTokens(path, 4)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        StoredTokens(tmp_path / "nowhere", 4)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="empty has no"):
        StoredTokens([tmp_path / "empty"], 4)
    with pytest.raises(ValueError, match="length=0; rows have 1 token or more"):
        StoredTokens(tmp_path, 0)
    with pytest.raises(ValueError, match="no paths"):
        StoredTokens([], 4)


def test_a_file_that_is_cut_while_it_is_read_is_named(tmp_path):
    path = written(tmp_path, [np.arange(50)]) / "00000.npy"
    stored = StoredTokens(tmp_path, 4)
    path.write_bytes(path.read_bytes()[:150])
    stored.read([0])
    with pytest.raises(ValueError, match=r"00000.npy: bytes 192 to 202 are gone; the file had 228"):
        stored.read([8])
    with pytest.raises(IndexError, match="rows 0 to 11, got"):
        stored.read([12])


def test_other_bytes_order_and_versions_are_read_too(tmp_path):
    np.save(tmp_path / "big.npy", np.arange(100, dtype=">u4"))
    with open(tmp_path / "two.npy", "wb") as file:
        np.lib.format.write_array(file, np.arange(100, 200, dtype=np.uint8), version=(2, 0))
    inputs, _ = StoredTokens(sorted(tmp_path.glob("*.npy")), 9).read(np.arange(22))
    assert inputs[[0, 11]].tolist() == [list(range(9)), list(range(100, 109))]


def test_a_writer_refuses_what_it_would_spoil(tmp_path):
    written(tmp_path, [np.arange(5)])
    with pytest.raises(ValueError, match=r"has files of tokens already, 00000.npy the first of 1"):
        TokenWriter(tmp_path)
    writer = TokenWriter(tmp_path / "more", dtype=np.uint8)
    for bad in (np.array([1, 256]), np.array([-1]), np.zeros(3), np.zeros((2, 2), int)):
        with pytest.raises(ValueError, match="uint8 has room for 0 to 255|it is integers"):
            writer.add(bad)
    with pytest.raises(TypeError, match=r"end=1\.5: must be a whole number"):
        writer.add([1, 2], end=1.5)
    writer.add([])      # which NumPy makes floats
    writer.close()
    assert not any((tmp_path / "more").iterdir())
    with pytest.raises(ValueError, match="dtype=float32"):
        TokenWriter(tmp_path / "floats", dtype=np.float32)
    with pytest.raises(ValueError, match="shard=0"):
        TokenWriter(tmp_path / "none", shard=0)


def test_what_is_broken_off_leaves_whole_files_only(tmp_path):
    with pytest.raises(ZeroDivisionError), TokenWriter(tmp_path, shard=10) as writer:
        writer.add(np.arange(12))
        writer.add(np.arange(5))
        raise ZeroDivisionError
    assert [path.name for path in tmp_path.iterdir()] == ["00000.npy"] and writer.tokens == 12


def test_a_full_disk_is_told_with_the_file_and_leaves_no_part(tmp_path):
    with TokenWriter(tmp_path, shard=10) as writer, file_size_limit(5_000):
        writer.add(np.arange(12))
        with pytest.raises(OSError, match=r"File too large: '.*00001\.npy'"):
            writer.add(np.arange(10_000))
        assert [path.name for path in tmp_path.iterdir()] == ["00000.npy"]
    with pytest.raises(FileNotFoundError, match=r"00000\.npy"), TokenWriter(tmp_path / "gone") as writer:
        (tmp_path / "gone").rmdir()
        writer.add(np.arange(3))


def test_a_fingerprint_tells_other_tokens(tmp_path):
    def of(name, tokens, **options):
        return StoredTokens(written(tmp_path / name, tokens, **options), 4).fingerprint()
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 500, 40_000)
    other = tokens.copy()
    other[20_000] += 1
    found = [of("a", [tokens]), of("b", [tokens[:-1]]), of("c", [other]), of("d", [tokens], dtype=np.int32),
             of("e", [tokens[:9000], tokens[9000:]], shard=9000)]
    assert len(set(found)) == 5 and of("f", [tokens]) == found[0]
    assert len({of("g", [np.arange(9)]), of("h", [np.arange(1, 10)])}) == 2


def test_bytes_are_a_vocabulary_of_any_text():
    vocabulary = Bytes()
    text = "né 数 \x00"
    numbers = vocabulary.encode(text)
    assert numbers.dtype == np.uint8 and numbers.tolist() == list(text.encode()) and len(vocabulary) == 257
    assert vocabulary.decode(np.append(numbers, vocabulary.end)) == text
    assert vocabulary.decode([0xC3, ord("a")]) == "�a"
    for bad in (-1, 257):
        with pytest.raises(ValueError, match=f"numbers from {bad} to {bad}"):
            vocabulary.decode([bad])
