"""Files of parameters that are damaged, or none at all, are named, with what is wrong."""

import pickle

import numpy as np
import pytest

from minitorch_dist import nn, training
from minitorch_dist.checkpoints.npz import read_npz
from minitorch_dist.compress import soup


@pytest.fixture
def whole(tmp_path):
    path = tmp_path / "parameters.npz"
    training.save_parameters(path, nn.Linear(3, 5))
    return path


@pytest.mark.parametrize(("keep", "words"), [(0, "is no .npz file: it is empty"), (1, "it begins with b'P'"),
                                             (100, "is damaged or cut short"), (-7, "is damaged or cut short")])
def test_a_file_that_is_cut_short(whole, keep, words):
    whole.write_bytes(whole.read_bytes()[:keep])
    for read in (read_npz, lambda path: training.load_parameters(path, nn.Linear(3, 5)),
                 lambda path: soup.read_states([path])):
        with pytest.raises(ValueError, match=f"parameters.npz {words}|parameters.npz is no .npz file: {words}"):
            read(whole)


def test_any_byte_that_is_another_is_found_or_harmless(whole):
    """A zip file has a checksum of what it holds, and fields that nobody reads."""
    content, wanted, rng = whole.read_bytes(), read_npz(whole), np.random.default_rng(0)
    for place in rng.choice(len(content), 200, replace=False):
        changed = bytearray(content)
        changed[place] ^= rng.integers(1, 256)
        whole.write_bytes(changed)
        try:
            found = read_npz(whole)
        except ValueError as error:
            assert "parameters.npz is " in str(error)
        else:
            assert all((found[name] == array).all() for name, array in wanted.items() if name in found)


@pytest.mark.parametrize("changed", [(b"}", b" "), (b"<f8", b",f8")])
def test_a_header_that_is_no_python_is_found_before_the_checksum(tmp_path, changed):
    path = tmp_path / "a.npz"
    np.savez(path, a=np.zeros(5000))
    path.write_bytes(path.read_bytes().replace(*changed, 1))
    with pytest.raises(ValueError, match="a.npz is damaged or cut short"):
        read_npz(path)


@pytest.mark.parametrize("content", [b"text", pickle.dumps({"a": 1})])
def test_another_kind_of_file(tmp_path, content):
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(ValueError, match="a.npz is no .npz file: it begins with"):
        read_npz(tmp_path / "a.npz")
    with pytest.raises(IsADirectoryError):
        read_npz(tmp_path)


def test_parameters_of_another_model(whole):
    with pytest.raises(ValueError, match="parameters.npz is of another model: .*shape"):
        training.load_parameters(whole, nn.Linear(3, 4))
    with pytest.raises(ValueError, match="parameters.npz is of another model: .*no values for"):
        training.load_parameters(whole, nn.lenet())
