"""Augmentation belongs to the sample."""

import numpy as np
import pytest

from minitorch_dist.data.augment import RandomShift

images = np.random.default_rng(0).random((20, 36), np.float32)


def test_a_sample_is_shifted_alike_in_any_company():
    shift = RandomShift(20, side=6, reach=2, seed=3)
    whole = shift(images, np.arange(20), epoch=1)
    some = np.array([13, 2, 7])
    np.testing.assert_array_equal(RandomShift(20, side=6, reach=2, seed=3)(images[some], some, epoch=1), whole[some])
    assert not np.array_equal(shift(images, np.arange(20), epoch=2), whole)
    assert not np.array_equal(RandomShift(20, side=6, reach=2, seed=4)(images, np.arange(20), epoch=1), whole)


def test_the_shift_is_what_shifts_says():
    shift = RandomShift(20, side=6, reach=2)
    out = shift(images, np.arange(20), epoch=0).reshape(20, 6, 6)
    for image, (down, right), got in zip(images.reshape(20, 6, 6), shift.shifts(0), out, strict=True):
        expected = np.full((6, 6), image[0, 0])
        for r in range(6):
            for c in range(6):
                if 0 <= r - down < 6 and 0 <= c - right < 6:
                    expected[r, c] = image[r - down, c - right]
        np.testing.assert_array_equal(got, expected)
    assert set(shift.shifts(0).ravel()) == {-2, -1, 0, 1, 2} and out.dtype == np.float32


def test_no_reach_changes_nothing_and_too_much_is_named():
    np.testing.assert_array_equal(RandomShift(20, side=6, reach=0)(images, np.arange(20), 0), images)
    for reach in (6, -1):
        with pytest.raises(ValueError, match=f"reach {reach} for images of 6"):
            RandomShift(20, side=6, reach=reach)
