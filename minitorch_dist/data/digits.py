"""UCI optical digits: 1,797 handwritten digits that ship with the package, for when MNIST can't be had.

DIGITS.md beside this file names the authors, the licence and the source.
"""

from pathlib import Path

import numpy as np

PATH = Path(__file__).with_name("digits.npz")
TRAIN = 1437   # images before this index train, the other 360 test
ABOUT = ("UCI optical digits, real handwriting that comes with the package, 1,437 training and 360 test images, "
         "enlarged from 8×8 to 28×28")
INK = 144      # a fully inked pixel after `enlarge`
MEAN, STD = 0.2182, 0.3059   # of all training pixels after `enlarge`, scaled to 0..1


def arrays():
    """(train_images, train_labels, test_images, test_labels); images float32 (n, 784), labels int64 (n,), 0 to 9.

    An image is enlarged to 28×28 and then (ink − MEAN) / STD. The numbers are the same on every machine: integers until
    the last three operations, each of which IEEE 754 rounds in one way only.

    The last 360 images test. The file keeps each writer's digits together (an image's nearest neighbour lies 85 places
    away in the median, 530 if the order were random), so that most of these were written by people whom training never
    saw, as in MNIST. A split that takes every fifth image looks better (a nearest-neighbour classifier gets 99.2 %
    instead of 95.6 %) because it tests each writer on copies of their own hand.
    """
    with np.load(PATH, allow_pickle=False) as file:
        small, labels = file["images"], file["labels"].astype(np.int64)
    images = enlarge(small).reshape(len(small), -1).astype(np.float32)
    images /= INK
    images -= MEAN
    images /= STD
    return images[:TRAIN], labels[:TRAIN], images[TRAIN:], labels[TRAIN:]


def enlarge(small):
    """uint8 (n, 8, 8), 0 to 16 -> uint8 (n, 28, 28), 0 to 144: bilinear to 24×24, then two pixels of paper all round.

    The eight pixels are three output pixels wide each; beyond the edge is paper, as in the border.
    """
    paper = np.pad(small, ((0, 0), (1, 1), (1, 1)))
    wide = _three_times(_three_times(paper, axis=1), axis=2)
    return np.pad(wide, ((0, 0), (2, 2), (2, 2)))


def _three_times(images, axis):
    """Stretch `axis` from k+2 to 3k pixels, linearly between the centres; values grow threefold and stay integers.

        centres of the input        ·     A     ·     B     ·
        centres of the output       ·   a a a   ·   b b b   ·
        hence      a₀ = 1 before + 2 A,   a₁ = 3 A,   a₂ = 2 A + 1 B      (over 3)
    """
    before, here, after = (np.take(images, range(i, i + images.shape[axis] - 2), axis) for i in range(3))
    trio = np.stack([before + 2 * here, 3 * here, 2 * here + after], axis=axis + 1)
    shape = list(here.shape)
    shape[axis] *= 3
    return trio.reshape(shape)
