"""load(): where the data comes from, what is said, and that all ranks agree on it."""

import gzip
import hashlib

import numpy as np
import pytest

from minitorch_dist import data
from minitorch_dist.data import download, mnist
from tests.data.mirrors import serving
from tests.data.test_idx import idx_bytes
from tests.data.test_mnist import small_mnist


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """No data folder named, an empty cache, no mirror but those that a test brings."""
    monkeypatch.delenv("MINITORCH_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(download, "MIRRORS", ())


@pytest.fixture
def no_download(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("nothing should be downloaded here")
    monkeypatch.setattr(download, "fetch", refuse)


def on_ranks(size, *arguments, say=print, **options):
    """load() on `size` ranks, one after another, with what rank 0 broadcasts handed to all: results or errors."""
    sent, results = [], []

    def broadcast(obj):
        sent.append(obj)
        return sent[0]

    for rank in range(size):
        assert rank == 0 or sent, "rank 0 ended without telling the others: they would wait forever"
        try:
            results.append(data.load(*arguments, rank=rank, broadcast=broadcast, say=say, **options))
        except data.DataNotFound as error:
            results.append(error)
    assert sent[1:] == [None] * (size - 1)   # only rank 0 has something to tell
    return results


def test_digits(no_download):
    said = []
    for d in on_ranks(2, "digits", say=said.append):
        assert d.name == "digits" and (d.default_epochs, d.default_batch_size) == (20, 64)
        assert d.train_images.shape == (1437, 784) and d.test_labels.shape == (360,)
        assert "1,437" in d.source and "digits" in d.source
    assert said == []


@pytest.mark.parametrize("name", ["auto", "mnist"])
@pytest.mark.parametrize("by", ["argument", "environment"])
def test_a_named_folder(no_download, monkeypatch, tmp_path, name, by):
    written = small_mnist(tmp_path / "mine", spelling=1)
    monkeypatch.chdir(tmp_path)   # a relative path is made absolute before other ranks hear of it
    if by == "environment":
        monkeypatch.setenv("MINITORCH_DATA", "mine")
    for d in on_ranks(3, name, **({"data_dir": "mine"} if by == "argument" else {})):
        assert d.name == "mnist" and (d.default_epochs, d.default_batch_size) == (3, 128)
        np.testing.assert_array_equal(d.train_labels, written[1])
        assert str(tmp_path / "mine") in d.source and "5 training" in d.source


def test_the_argument_goes_before_the_environment(no_download, monkeypatch, tmp_path):
    small_mnist(tmp_path / "mine")
    monkeypatch.setenv("MINITORCH_DATA", str(tmp_path / "other"))
    assert data.load("auto", data_dir=tmp_path / "mine").name == "mnist"


@pytest.mark.parametrize("name", ["auto", "mnist"])
@pytest.mark.parametrize("by", ["data_dir", "MINITORCH_DATA"])
def test_a_named_folder_without_the_files_is_an_error_on_every_rank(no_download, monkeypatch, tmp_path, name, by):
    small_mnist(tmp_path / "cache" / "minitorch_dist" / "mnist")   # not looked at: named means named
    options = {"data_dir": tmp_path} if by == "data_dir" else {}
    monkeypatch.setenv("MINITORCH_DATA", str(tmp_path) if by == "MINITORCH_DATA" else "")
    for error in on_ranks(3, name, **options):
        assert isinstance(error, data.DataNotFound)
        for words in (str(tmp_path), "t10k-labels.idx1-ubyte", by, "no other place"):
            assert words in str(error)


@pytest.mark.parametrize("folder, words", [("~nobody-of-that-name/mnist", "home directory"), ("mine", "not allowed")])
def test_a_folder_that_cannot_be_looked_into_is_an_error_on_every_rank(no_download, monkeypatch, folder, words):
    def refuse(folder):
        raise PermissionError(f"{folder}: not allowed")
    monkeypatch.setattr(data.mnist, "find", refuse)
    for error in on_ranks(3, "mnist", data_dir=folder):
        assert isinstance(error, data.DataNotFound) and words in str(error) and "no other place" in str(error)


def test_unsound_files_are_an_error_under_auto_too(no_download, tmp_path):
    small_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(b"not an idx file")
    with pytest.raises(data.IdxError, match="t10k-labels"):
        data.load("auto", data_dir=tmp_path)


def test_offline_auto_takes_the_digits_loudly_on_every_rank():
    said = []
    assert [d.name for d in on_ranks(3, "auto", say=said.append)] == ["digits"] * 3
    assert len(said) == 1
    for words in ("MNIST", "UCI optical digits", "--data-dir", "MINITORCH_DATA", "network"):
        assert words in said[0]


def test_offline_mnist_never_falls_back():
    for error in on_ranks(3, "mnist"):
        assert isinstance(error, data.DataNotFound)
        for words in ("--data-dir", "MINITORCH_DATA", "network"):
            assert words in str(error)


@pytest.fixture
def published(monkeypatch, tmp_path):
    """Small files, passed off as the published ones; yields their folder."""
    small_mnist(tmp_path / "published")
    contents = {name: (tmp_path / "published" / name).read_bytes() for name in mnist.SHA256}
    monkeypatch.setattr(mnist, "SHA256", {n: hashlib.sha256(c).hexdigest() for n, c in contents.items()})
    return contents


def test_download_cache_and_repair(monkeypatch, tmp_path, published):
    pytest.importorskip("pooch")
    cache = tmp_path / "cache" / "minitorch_dist" / "mnist"
    with serving(published) as url:
        monkeypatch.setattr(download, "MIRRORS", (url("good"),))
        results = on_ranks(2, "auto")
        assert [d.name for d in results] == ["mnist"] * 2 and str(cache) in results[0].source
        assert len(url.asked) == 4   # once each, by rank 0 alone
        assert {p.name: p.read_bytes() for p in cache.iterdir()} == published

        damaged = cache / "t10k-images-idx3-ubyte.gz"
        damaged.write_bytes(gzip.compress(idx_bytes(np.zeros((3, 28, 28), np.uint8))))   # sound, but not the published
        assert data.load("mnist").name == "mnist"
        assert url.asked[4:] == ["/good/t10k-images-idx3-ubyte.gz"]
        assert damaged.read_bytes() == published[damaged.name]
    assert data.load("mnist").name == "mnist"   # the server is gone; the cache is not


def test_a_full_cache_needs_no_network_and_no_pooch(no_download, tmp_path, published):
    small_mnist(tmp_path / "cache" / "minitorch_dist" / "mnist")
    assert [d.name for d in on_ranks(2, "auto")] == ["mnist"] * 2


def test_another_machine_that_does_not_see_the_folder(tmp_path):
    choice = data.Choice("mnist", str(tmp_path / "only on rank 0's disk"))
    with pytest.raises(data.DataNotFound, match="(?s)Rank 3 on .*all machines share"):
        data.load("mnist", rank=3, broadcast=lambda _: choice)


def test_an_unknown_name():
    with pytest.raises(ValueError, match="'cifar'.*'auto', 'mnist', 'digits'"):
        data.load("cifar")


def test_digits_with_a_folder_is_a_contradiction(tmp_path):
    with pytest.raises(ValueError, match="ship with the package"):
        data.load("digits", data_dir=tmp_path)


def test_a_folder_in_place_of_a_name_is_told_its_own_argument(tmp_path):
    for folder in (str(tmp_path), tmp_path):
        with pytest.raises(ValueError, match=f"There is no data set .*load\\('mnist', data_dir='{tmp_path}'\\)"):
            data.load(folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(data.DataNotFound, match="No MNIST in .*file: that is a file"):
        data.load("mnist", tmp_path / "file")
