"""Adafactor of models that are cut: means and RMS are those of whole parameters."""

import numpy as np
import pytest

from tests.crews import crews, threads

from . import adafactor_cases, eight_bit_cases

CASES = "tests.parallel.adafactor_cases:"
OPTIMIZERS = adafactor_cases.OPTIMIZERS


@pytest.fixture(scope="module")
def alone():
    return crews.call(CASES + "exact_curves", 1, (["ddp"],), env=threads(1))[0]


@pytest.mark.parametrize("n, ways", [(1, ["1", "3"]), (2, ["ddp", "3"]), (4, ["1", "2", "hybrid"])])
def test_one_set_of_bits(alone, n, ways):
    """Of parameters and state, in exact mode."""
    for rank, found in enumerate(crews.call(CASES + "exact_curves", n, (ways,), env=threads(n))):
        for (name, way), digest in found.items():
            assert digest == alone[name, "ddp"] or rank and way != "ddp", (name, way)
    assert len(set(alone.values())) == len(OPTIMIZERS)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("n, stage", [(2, None), (2, 3), (4, 2)])
def test_parts_of_tensor_parallelism_and_pieces_of_these(name, n, stage):
    wanted = eight_bit_cases.steps(eight_bit_cases.model(64), OPTIMIZERS[name]).state_dict()
    found = crews.call(CASES + "of_parts", n, (name, stage))[0]
    for key, value in wanted.items():
        np.testing.assert_allclose(found[key], value, rtol=0, atol=1e-10, err_msg=key)
