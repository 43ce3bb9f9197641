"""LAMB and LARS of models that are cut: the norms are those of whole parameters."""

import numpy as np
import pytest

from tests.crews import crews, threads

from . import eight_bit_cases, trust_ratio_cases

CASES = "tests.parallel.trust_ratio_cases:"


@pytest.fixture(scope="module")
def alone():
    return crews.call(CASES + "exact_curves", 1, (["ddp"],), env=threads(1))[0]


@pytest.mark.parametrize("n, ways", [(2, ["3"]), (4, ["1"])])
def test_one_set_of_bits(alone, n, ways):
    for rank, found in enumerate(crews.call(CASES + "exact_curves", n, (ways,), env=threads(n))):
        for (name, way), digest in found.items():
            assert digest == alone[name, "ddp"] or rank and way != "ddp", (name, way)
    assert len(set(alone.values())) == len(trust_ratio_cases.OPTIMIZERS)


@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_parts_of_tensor_parallelism_and_pieces_of_these(name):
    wanted = eight_bit_cases.steps(eight_bit_cases.model(64), trust_ratio_cases.OPTIMIZERS[name]).state_dict()
    for n, stage in ((2, None), (4, 2)):
        found = crews.call(CASES + "of_parts", n, (name, stage))[0]
        for key, value in wanted.items():
            np.testing.assert_allclose(found[key], value, rtol=0, atol=1e-10, err_msg=key)
