"""What interpret.py mends in Triton's interpreter, so that kernels say what they mean to a GPU."""

import numpy as np
import pytest
import triton
import triton.language as tl

from minitorch_dist import kernels
from minitorch_dist.kernels.kernel import Kernel

pytestmark = pytest.mark.skipif(not kernels.interpreting(), reason="Triton compiles in this process")


@triton.jit
def _unless(skip, x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n), mask=(tl.load(skip) == 0) & (i < n))


UNLESS = Kernel("unless", _unless, {"skip": "*", "x": "*fp32", "out": "*fp32", "n": "i32"}, {"BLOCK": 16})


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.uint8])
def test_a_comparison_of_two_numbers_is_a_part_of_a_mask(dtype):
    """It is one bit per element, whatever is compared."""
    x = np.arange(1, 14, dtype=np.float32)
    for skip in (0, 1):
        out = np.zeros(16, np.float32)
        UNLESS((1,), np.array([skip], dtype), x, out, 13)
        assert out.tolist() == ([0] * 16 if skip else [*x, 0, 0, 0])
