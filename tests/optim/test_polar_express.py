"""The polynomials against the paper's numbers, against what makes them the best, and in Muon."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import optim
from minitorch_dist.optim.muon import orthogonalized
from minitorch_dist.optim.polar_express import at, best

from .test_muon import gradients, leaves, start

PAPER = [   # algorithm 1, before its safety factor
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248), (1.875, -1.25, 0.375)]


def test_the_papers_numbers():
    np.testing.assert_allclose(optim.polar_express(8, safety=0), PAPER, rtol=3e-8)
    np.testing.assert_allclose(optim.polar_express(5, safety=0), PAPER[:5], rtol=1e-12)
    found = np.array(optim.polar_express(5))
    np.testing.assert_allclose(found, np.array(PAPER[:5]) / [1.01, 1.01 ** 3, 1.01 ** 5], rtol=1e-12)


@pytest.mark.parametrize(("low", "high"), [(1e-3, 1.0), (0.05, 1.9), (0.4, 1.6), (0.9, 1.1)])
def test_the_largest_error_comes_four_times_by_turns(low, high):
    """By which no other odd polynomial of degree 5 is nearer (Chebyshev)."""
    p, x = best(low, high), np.linspace(low, high, 200_001)
    error = at(p, x) - 1
    extremes = [0, *(np.flatnonzero(np.diff(np.sign(np.diff(error)))) + 1), len(x) - 1]
    assert len(extremes) == 4
    values = error[extremes]
    np.testing.assert_allclose(np.abs(values), np.abs(error).max(), rtol=1e-6)
    assert (np.sign(values) == [-1, 1, -1, 1]).all()


def test_where_the_equations_have_lost_their_digits():
    np.testing.assert_allclose(best(1 - 1e-6, 1.0), best(1 - 1e-5, 1.0), rtol=1e-4)
    assert best(1 - 1e-6, 1.0).tolist() == [1.875, -1.25, 0.375]
    np.testing.assert_allclose(best(1.5 - 1e-6, 1.5), [1.875 / 1.5, -1.25 / 1.5 ** 3, 0.375 / 1.5 ** 5])


@pytest.mark.parametrize(("steps", "low", "high"), [(5, 0.84, 1.13), (6, 0.994, 1.002), (8, 0.99999, 1.00001)])
def test_how_near_they_come(steps, low, high):
    """Muon's five times the same: from 0.68 to 1.21, of singular values from 0.003."""
    u, _, vt = np.linalg.svd(np.random.default_rng(1).standard_normal((40, 30)), full_matrices=False)
    s = np.logspace(-3, 0, 30)
    s /= np.linalg.norm(s)
    diagonal = np.diagonal(u.T @ orthogonalized(7.0 * (u * s) @ vt, optim.polar_express(steps), steps) @ vt.T)
    assert low < diagonal[s >= 1e-3].min() and diagonal.max() < high


def test_the_last_one_is_for_all_that_follow():
    u = np.random.default_rng(2).standard_normal((5, 8))
    first, second = optim.polar_express(2)
    assert (orthogonalized(u, (first, second), 4) == orthogonalized(u, (first, second, second, second), 4)).all()
    assert (orthogonalized(u, (first,), 3) == orthogonalized(u, first, 3)).all()
    assert (orthogonalized(u, (first, second), 1) == orthogonalized(u, first, 1)).all()


@pytest.mark.parametrize("kind", [optim.Muon, optim.NorMuon, optim.Dion2])
def test_steps_by_them(kind):
    """And state goes on, whose settings have been lists on their way through JSON."""
    found = []
    for saves in (False, True):
        params = leaves(start())
        optimizer = kind(params, 0.02, ns_coefficients=optim.polar_express(6), ns_steps=6)
        for step in range(4):
            if saves and step == 2:
                saved = optimizer.state_dict()
                saved["groups"] = [{**g, "ns_coefficients": list(map(list, g["ns_coefficients"]))}
                                   for g in saved["groups"]]
                optimizer = kind(params)
                optimizer.load_state_dict(saved)
            for p, g in zip(params, gradients(step), strict=True):
                p.grad = mt.tensor(g)
            optimizer.step()
        assert optimizer.param_groups[0]["ns_coefficients"] == optim.polar_express(6)
        found.append([p.numpy().tobytes() for p in params])
    assert found[0] == found[1]


@pytest.mark.parametrize(("settings", "says"), [
    ({"steps": 0}, "steps is 0"), ({"steps": 2.5}, "steps is 2.5"), ({"steps": "5"}, "steps is '5'"),
    ({"steps": float("inf")}, "steps is inf"), ({"lowest": 0}, "lowest is 0"),
    ({"lowest": 1}, r"lowest is 1; it must be in \(0, 1\)"), ({"cushion": 1}, "cushion"), ({"safety": -0.1}, "safety")])
def test_settings_out_of_range_raise(settings, says):
    with pytest.raises(ValueError, match=says):
        optim.polar_express(**settings)


@pytest.mark.parametrize("wrong", [(), ((1, 2),), ((1, 2, 3), (1, 2)), (1, 2), 3, None])
def test_what_are_no_coefficients_is_refused(wrong):
    with pytest.raises(ValueError, match="it must be three numbers, or three for each step"):
        optim.Muon(leaves(start()), ns_coefficients=wrong)
