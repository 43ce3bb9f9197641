"""Experts over ranks that share the sequences, too: each routes its own positions; one curve, no work done twice."""

import numpy as np
import pytest

from tests.crews import crews

CASES = "tests.parallel.folding_cases:"
MESHES = [(2, {"tp": 2}), (3, {"tp": 3}), (4, {"ep": 2, "tp": 2}), (4, {"tp": 2}),
          pytest.param(8, {"ep": 2, "tp": 2}, marks=pytest.mark.thorough)]


@pytest.fixture(scope="module")
def one_process():
    """{(setting, optimizer): what it gives}"""
    found = {}

    def of(setting, optimizer="AdamW"):
        if (setting, optimizer) not in found:
            found[setting, optimizer], = crews.call(CASES + "train", 1, args=(setting, {}, 0, optimizer))
        return found[setting, optimizer]
    return of


def compared(got, wanted):
    losses, norms, state, loads = got
    np.testing.assert_allclose(losses, wanted[0], rtol=1e-10)
    np.testing.assert_allclose(norms, wanted[1], rtol=1e-10)
    assert loads == wanted[3]
    if state:
        assert state.keys() == wanted[2].keys()
        for name, value in state.items():
            np.testing.assert_allclose(value, wanted[2][name], rtol=1e-8, atol=1e-10, err_msg=name)
    return bool(state)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("n", "mesh"), MESHES)
@pytest.mark.parametrize("setting", ["balanced", "as DeepSeek-V3"])
def test_one_curve_on_any_mesh(one_process, setting, n, mesh, stage):
    found = crews.call(CASES + "train", n, args=(setting, mesh, stage))
    states = [compared(got, one_process(setting)) for got in found]
    assert sum(states) == (mesh["tp"] if stage else n)


@pytest.mark.parametrize("n", [2, 3])
def test_groups_of_all_of_a_call(one_process, n):
    """Where ranks with samples of their own have groups of their own there are others; so tp alone."""
    for got in crews.call(CASES + "train", n, args=("of all of a call", {"tp": n})):
        compared(got, one_process("of all of a call"))
