"""MNIST's own checks on small synthetic files, and the real files where MINITORCH_DATA names them."""

import gzip
import os
from pathlib import Path

import numpy as np
import pytest

from minitorch_dist.data import DataNotFound, idx, mnist
from tests.data.test_idx import idx_bytes

TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS = mnist.SHA256


def small_mnist(folder, train=5, test=3, spelling=0):
    """Four sound files with few samples in them; returns the raw training images and labels."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(1)
    written = []
    for names, n in (((TRAIN_IMAGES, TRAIN_LABELS), train), ((TEST_IMAGES, TEST_LABELS), test)):
        for name, array in zip(names, (random.integers(0, 256, (n, 28, 28), np.uint8),
                                       random.integers(0, 10, n, np.uint8)), strict=True):
            write(folder, name, array, spelling)
            written.append(array)
    return written


def write(folder, name, array, spelling=0):
    spelled = mnist.spellings(name)[spelling]
    content = idx_bytes(array)
    (folder / spelled).write_bytes(gzip.compress(content) if spelled.endswith(".gz") else content)


@pytest.mark.parametrize("spelling", range(4))
def test_all_spellings_are_read_and_normalised(tmp_path, spelling):
    written = small_mnist(tmp_path, spelling=spelling)
    train_images, train_labels, test_images, test_labels = mnist.arrays(tmp_path)
    assert train_images.shape == (5, 784) and test_images.shape == (3, 784)
    assert train_images.dtype == np.float32 and train_labels.dtype == np.int64
    assert train_images.flags.c_contiguous and test_images.flags.c_contiguous
    exact = (written[0].reshape(5, 784) / 255.0 - 0.1307) / 0.3081   # float64
    np.testing.assert_allclose(train_images, exact, rtol=0, atol=4e-7)
    np.testing.assert_array_equal(train_labels, written[1])
    np.testing.assert_array_equal(test_labels, written[3])


def test_spellings_are_the_usual_ones():
    assert mnist.spellings(TRAIN_IMAGES) == ["train-images-idx3-ubyte.gz", "train-images-idx3-ubyte",
                                             "train-images.idx3-ubyte.gz", "train-images.idx3-ubyte"]


UNSOUND = {
    "counts differ": (TRAIN_LABELS, np.zeros(4, np.uint8), ["5 images", "4 labels"]),
    "label out of range": (TRAIN_LABELS, np.array([0, 9, 10, 1, 255], np.uint8), ["2 labels", "0..9", "index 2: 10"]),
    "labels in place of images": (TEST_IMAGES, np.zeros(3, np.uint8), ["shape (3,)", "(n, 28, 28)"]),
    "images in place of labels": (TEST_LABELS, np.zeros((3, 28, 28), np.uint8), ["(3, 28, 28)", "shape (n,)"]),
    "wrong image size": (TEST_IMAGES, np.zeros((3, 28, 27), np.uint8), ["(3, 28, 27)", "(n, 28, 28)"]),
    "wrong element type": (TEST_IMAGES, np.zeros((3, 28, 28), np.float32), ["float32", "uint8"]),
    "signed labels": (TEST_LABELS, np.full(3, -1, np.int8), ["int8", "uint8"]),
    "no image": (TRAIN_IMAGES, np.zeros((0, 28, 28), np.uint8), ["no image at all"]),
}


@pytest.mark.parametrize("case", UNSOUND)
def test_files_that_are_no_mnist(tmp_path, case):
    name, array, words = UNSOUND[case]
    small_mnist(tmp_path)
    write(tmp_path, name, array)
    with pytest.raises(idx.IdxError) as caught:
        mnist.arrays(tmp_path)
    for word in [str(tmp_path / name), *words]:
        assert word in str(caught.value)


def test_missing_files_are_listed_under_every_name_that_was_tried(tmp_path):
    small_mnist(tmp_path)
    (tmp_path / TEST_LABELS).unlink()
    with pytest.raises(DataNotFound) as caught:
        mnist.find(tmp_path)
    assert "1 of its 4 files" in str(caught.value) and TRAIN_LABELS not in str(caught.value)
    for spelling in mnist.spellings(TEST_LABELS):
        assert spelling in str(caught.value)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(DataNotFound, match="no such folder"):
        mnist.find(tmp_path / "none")


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert mnist.cache_folder() == tmp_path / "minitorch_dist" / "mnist"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    for platform, caches in (("linux", ".cache"), ("darwin", "Library/Caches"), ("freebsd14", ".cache")):
        monkeypatch.setattr(mnist.sys, "platform", platform)
        assert mnist.cache_folder() == tmp_path / "me" / caches / "minitorch_dist" / "mnist"


@pytest.fixture(scope="module")
def real_folder():
    if not os.environ.get("MINITORCH_DATA"):
        pytest.skip("MINITORCH_DATA names no folder with the real MNIST files")
    return Path(os.environ["MINITORCH_DATA"])


def test_real_mnist(real_folder):
    train_images, train_labels, test_images, test_labels = mnist.arrays(real_folder)
    assert train_images.shape == (60_000, 784) and test_images.shape == (10_000, 784)
    # the class sizes that everybody counts
    np.testing.assert_array_equal(np.bincount(train_labels), [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851,
                                                              5949])
    np.testing.assert_array_equal(np.bincount(test_labels), [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009])
    assert abs(train_images.mean(dtype=np.float64)) < 1e-3 and abs(train_images.std(dtype=np.float64) - 1) < 1e-3
    assert train_labels[:5].tolist() == [5, 0, 4, 1, 9] and test_labels[:5].tolist() == [7, 2, 1, 0, 4]


def test_published_checksums_fit_the_real_files(real_folder):
    """The training images are left out: a user's own copy may be repacked."""
    for name in (TRAIN_LABELS, TEST_IMAGES, TEST_LABELS):
        if (real_folder / name).is_file():
            assert mnist._sha256(real_folder / name) == mnist.SHA256[name]
