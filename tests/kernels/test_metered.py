"""What the course's meter promises: a kernel's mistake is counted alike wherever memory was free."""

import numpy as np
import pytest

from minitorch_dist import kernels

pytestmark = pytest.mark.skipif(not kernels.interpreting(), reason="Triton compiles in this process")


@pytest.mark.parametrize("size", [1, 50 * 16, 70_001])
def test_who_takes_bytes_for_elements_meets_no_other_array(size):
    from minitorch_dist.kernels.metered import addresses, laid
    arrays = [laid(np.ones(size, np.float32), [1]) for _ in range(12)]
    for one in arrays:
        begin, other = int(addresses(one)[0]), [addresses(a) for a in arrays if a is not one]
        wrong = begin + 4 * 4 * np.arange(-size, size + 1)      # in bytes: the steps' 4, and the elements' own
        assert not np.isin(np.concatenate(other).astype(np.int64), wrong).any()
