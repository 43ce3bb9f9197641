"""Text, windows and addition problems."""

import copy
import pickle

import numpy as np
import pytest

from minitorch_dist.data import Loader
from minitorch_dist.data.text import IGNORED, Bytes, Characters, Windows, addition, read_text


def test_characters_go_there_and_back():
    v = Characters("hello wörld")
    np.testing.assert_array_equal(v.decode(v.encode("wölr d")), "wölr d")
    assert v.symbols == sorted(set("hello wörld")) and v.encode("öl").dtype == np.int64
    with pytest.raises(ValueError, match="'z' does not occur"):
        v.encode("hez")


def test_a_copy_of_windows_is_no_larger_than_the_text():
    tokens = np.arange(1000)
    saved = pickle.dumps(Windows(tokens, 100))
    assert len(saved) < 2 * tokens.nbytes
    for twin in (pickle.loads(saved), copy.deepcopy(Windows(tokens, 100))):
        assert twin.inputs.strides == (8, 8) and (twin.targets[[3, 899]] == [tokens[4:104], tokens[900:]]).all()


def test_windows_are_rows_that_a_loader_shards():
    tokens = np.arange(100) ** 2 % 17
    w = Windows(tokens, 7)
    assert len(w.inputs) == len(w.targets) == 93
    np.testing.assert_array_equal(w.inputs[np.array([0, 92])], [tokens[:7], tokens[92:99]])
    np.testing.assert_array_equal(w.targets[np.array([0, 92])], [tokens[1:8], tokens[93:100]])
    loaders = [Loader(w.inputs, w.targets, 10, rank=r, size=2) for r in (0, 1)]
    whole = next(iter(Loader(w.inputs, w.targets, 10).epoch(0)))
    parts = [next(iter(loader.epoch(0))) for loader in loaders]
    np.testing.assert_array_equal(np.concatenate([p.inputs for p in parts]), whole.inputs)
    np.testing.assert_array_equal(whole.inputs[:, 1:], whole.labels[:, :-1])
    np.testing.assert_array_equal(w.inputs[-1], tokens[92:99])
    np.testing.assert_array_equal(w.targets[[-1, 5]], [tokens[93:100], tokens[6:13]])
    np.testing.assert_array_equal(w.targets[90:, 2], tokens[93:96])
    with pytest.raises(IndexError):
        w.inputs[93]
    with pytest.raises(ValueError, match="7 characters has no window of 7 and one more"):
        Windows(tokens[:7], 7)


def test_read_text_splits_without_overlap_and_names_bad_files(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("to be or not to be, " * 10, encoding="utf-8")
    text = read_text(path)
    assert len(text.train) == 180 and len(text.validation) == 20
    assert text.vocabulary.decode(np.concatenate([text.train, text.validation])) == "to be or not to be, " * 10
    path.write_bytes(b"abc\xff\xfe")
    with pytest.raises(ValueError, match="a.txt is not UTF-8 text: byte 0xff at 3"):
        read_text(path)
    path.write_text("")
    with pytest.raises(ValueError, match="holds 0 characters"):
        read_text(path)


def test_addition_lists_every_sum_once_and_right():
    problems = addition(2)
    rows = np.concatenate([problems.train, problems.test])
    assert len(problems.test) == 1000 and len(np.unique(rows, axis=0)) == len(rows) == 10_000
    for row in rows[::37]:
        text = problems.vocabulary.decode(row)
        question, answer = text.split("=")
        a, b = question.split("+")
        assert int(a) + int(b) == int(answer[::-1]) and len(question) + 1 == problems.question
    inputs, targets = problems.windows(problems.test)
    np.testing.assert_array_equal(targets[:, problems.question - 1:], problems.test[:, problems.question:])
    assert (targets[:, :problems.question - 1] == IGNORED).all() and inputs.shape == targets.shape
    np.testing.assert_array_equal(addition(2).train, problems.train)
    assert not np.array_equal(addition(2, seed=1).train, problems.train)
    with pytest.raises(ValueError, match="4 digits"):
        addition(4)


@pytest.mark.parametrize("base", [2, 7])
def test_addition_in_another_base(base):
    problems = addition(2, base=base)
    rows = np.concatenate([problems.train, problems.test])
    assert len(np.unique(rows, axis=0)) == len(rows) == base ** 4
    for row in rows[::29] if base > 2 else rows:
        question, answer = problems.vocabulary.decode(row).split("=")
        assert sum(int(number, base) for number in question.split("+")) == int(answer[::-1], base)
    assert problems.vocabulary.numbers == addition(2).vocabulary.numbers
    for wrong in (1, 11):
        with pytest.raises(ValueError, match=f"base {wrong};"):
            addition(2, base=wrong)


@pytest.mark.parametrize("number", [-1, 3])
def test_numbers_of_no_character(number):
    """-1 would be the last one."""
    with pytest.raises(ValueError, match=f"{number} is no character's number: the vocabulary has 3"):
        Characters("abc").decode([0, number])


def test_shares_that_leave_nothing_to_train_on(tmp_path):
    (tmp_path / "t").write_text("some words")
    for share in (1.0, -0.1):
        with pytest.raises(ValueError, match=f"validation={share}"):
            read_text(tmp_path / "t", share)
        with pytest.raises(ValueError, match=f"test={share}"):
            addition(1, test=share)
    assert read_text(tmp_path / "t", 0).validation.size == addition(1, test=0).test.size == 0
    with pytest.raises(TypeError, match=r"length=2\.5: must be a whole number"):
        Windows(np.arange(9), 2.5)


def test_the_shortest_that_there_is_something_to_learn_from(tmp_path):
    (tmp_path / "two").write_text("ab")
    assert read_text(tmp_path / "two", 0).train.tolist() == [0, 1]
    (tmp_path / "one").write_text("a")
    with pytest.raises(ValueError, match="one holds 1 characters"):
        read_text(tmp_path / "one")
    for length in (1, 3):
        windows = Windows(np.arange(length + 1), length)
        assert windows.inputs.tolist() == [[*range(length)]] and windows.targets.tolist() == [[*range(1, length + 1)]]
    assert Bytes().decode([104, 105, Bytes.end]) == "hi"
    for number in (-1, 257):
        with pytest.raises(ValueError, match=f"from {number} to {number}; there are 0 to 256"):
            Bytes().decode([number])
