"""join: ranks with unequal numbers of batches train as one process does that has the batches of all."""

import numpy as np
import pytest

from tests.crews import crews

from . import join_cases

CASES = "tests.parallel.join_cases:"


@pytest.mark.parametrize("n", [2, 3, 4])
def test_uneven_numbers_of_batches(n):
    wanted = join_cases.join_alone(n)
    steps = max(len(batches) for batches in join_cases.JOIN_BATCHES[:n])
    for values, calls, updates in crews.call(CASES + "join_uneven", n):
        assert updates == steps and calls == 4 * steps      # four buckets a step, on ranks without data too
        for name, value in wanted.items():
            np.testing.assert_allclose(values[name], value, rtol=0, atol=1e-12)


def test_misuse_says_what_to_do():
    for said in crews.call(CASES + "join_misuse", 2):
        assert "micro-shards" in said["exact"]
        assert "LayerNorm" in said["buffers"] and "LayerNorm" in said["batch norm"]
        assert "0 samples" in said["no rows"] and "2.5 samples" in said["half a row"]
        assert "exact mode" in said["hook in exact mode"]
