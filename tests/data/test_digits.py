"""The digits that ship: the file, the enlargement against an independent formula, the split."""

import hashlib

import numpy as np

from minitorch_dist.data import digits

FILE_SHA256 = "b2dab7b501728c22e9119ad76740b2e17c77a231e42d1e592380d90886f1a05e"
ARRAYS_SHA256 = "99207ba4a066073ca9692f2459f6e5fb6fc21c542cf9e8399f1cdea1365615ac"


def test_the_file_that_ships():
    content = digits.PATH.read_bytes()
    assert hashlib.sha256(content).hexdigest() == FILE_SHA256
    assert len(content) < 50_000


def test_its_authors_and_licence_ship_with_it():
    text = digits.PATH.with_name("DIGITS.md").read_text(encoding="utf-8")
    for words in ("Alpaydin", "Kaynak", "10.24432/C50P49", "CC BY 4.0"):
        assert words in text


def test_split_shapes_and_normalisation():
    train_images, train_labels, test_images, test_labels = digits.arrays()
    assert train_images.shape == (1437, 784) and test_images.shape == (360, 784)
    assert train_images.dtype == test_images.dtype == np.float32
    assert train_labels.dtype == test_labels.dtype == np.int64
    assert train_images.flags.c_contiguous and test_images.flags.c_contiguous
    assert abs(train_images.mean(dtype=np.float64)) < 1e-3 and abs(train_images.std(dtype=np.float64) - 1) < 1e-3
    # the published class sizes, and none of them thin in the test set
    np.testing.assert_array_equal(np.bincount(np.concatenate([train_labels, test_labels])),
                                  [178, 182, 177, 183, 181, 182, 181, 179, 174, 180])
    assert np.bincount(test_labels).min() >= 33
    with np.load(digits.PATH) as file:
        np.testing.assert_array_equal(test_labels, file["labels"][1437:])


def test_the_same_bits_on_every_machine():
    digest = hashlib.sha256()
    for array in digits.arrays():
        digest.update(array.astype(array.dtype.newbyteorder("<")).tobytes())
    assert digest.hexdigest() == ARRAYS_SHA256


def test_enlargement_is_bilinear():
    """Against np.interp, first down the rows, then along them, at the centres of 24 pixels laid over 8."""
    small = np.random.default_rng(0).integers(0, 17, (4, 8, 8), np.uint8)
    with_paper = np.pad(small.astype(float), ((0, 0), (1, 1), (1, 1)))
    centres = (np.arange(24) + 0.5) / 3 - 0.5 + 1   # +1: the row of paper in front

    def stretched(line):
        return np.interp(centres, np.arange(10), line)

    expected = np.apply_along_axis(stretched, 2, np.apply_along_axis(stretched, 1, with_paper))
    got = digits.enlarge(small)
    assert got.dtype == np.uint8 and got.shape == (4, 28, 28)
    np.testing.assert_allclose(got[:, 2:-2, 2:-2] / digits.INK, expected / 16, atol=1e-12)
    border = got.copy()
    border[:, 2:-2, 2:-2] = 0
    assert not border.any()


def test_full_ink_stays_full_ink():
    assert digits.enlarge(np.full((1, 8, 8), 16, np.uint8)).max() == digits.INK


def test_the_hard_split_is_what_the_docstring_says():
    """A nearest-neighbour classifier: 95.6 % on the last 360, 99.2 % on every fifth."""
    with np.load(digits.PATH) as file:
        pixels, labels = file["images"].reshape(-1, 64).astype(np.int64), file["labels"]
    norms = (pixels ** 2).sum(1)
    distances = norms[:, None] + norms - 2 * pixels @ pixels.T

    def accuracy(test):
        nearest = np.flatnonzero(~test)[distances[test][:, ~test].argmin(1)]
        return 100 * (labels[nearest] == labels[test]).mean()

    index = np.arange(len(pixels))
    assert round(accuracy(index >= digits.TRAIN), 1) == 95.6
    assert round(accuracy(index % 5 == 4), 1) == 99.2
