"""Arrays of bfloat16 reach the kernels as what they are, and the interpreter rounds as a GPU does."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import kernels
from minitorch_dist.kernels import add, dropout
from minitorch_dist.kernels.launch import pointer_type

from .harness import random

pytestmark = pytest.mark.skipif(not kernels.interpreting(), reason="Triton compiles in this process")


def test_sums_have_the_bits_of_the_host():
    x, y = (random(1025, dtype="bfloat16", seed=k) for k in range(2))
    found = add.add(x, y)
    assert found.dtype == mt.bfloat16
    np.testing.assert_array_equal(found.view(np.uint16), (x + y).view(np.uint16))


def test_dropout_has_the_bits_of_the_host():
    """1 / (1 - p) is rounded to the dtype."""
    x, key = random(300, dtype="bfloat16"), mt.backend.stream_key("bits")
    found, stays = dropout.dropout(x, 0.3, key), dropout.dropout(np.ones(300, np.float32), 0.3, key) > 0
    np.testing.assert_array_equal(found.view(np.uint16), mt.dropout(x, 0.3, mask=stays).view(np.uint16))
    assert 0 < stays.sum() < 300


def test_other_numbers_of_16_bits_are_refused():
    assert pointer_type(add.ADD, "x", np.zeros(4, np.uint16)) == "*u16"
    with pytest.raises(TypeError, match=r"x has dtype \|V2"):
        pointer_type(add.ADD, "x", np.zeros(4, "V2"))
