"""jacfwd, jacrev, hessian, hvp: closed forms, counted passes, nested inputs and outputs."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist.autodiff import jacobian

rng = np.random.default_rng(0)
A, X = rng.standard_normal((6, 4)), rng.standard_normal(4)


def f(x):
    """R⁴ → R⁶; its Jacobian is diag(cos Ax)·A."""
    return mt.sin(mt.matmul(A, x))


def quartic(x):
    return mt.sum(x * x) ** 2.0


J = np.cos(A @ X)[:, None] * A
H = 8 * np.outer(X, X) + 4 * (X @ X) * np.eye(4)


@pytest.mark.parametrize("jac", [mt.jacfwd, mt.jacrev])
def test_against_the_closed_form(jac):
    np.testing.assert_allclose(jac(f)(X), J, rtol=1e-12)


def test_one_jvp_per_column_and_one_vjp_per_row(monkeypatch):
    calls, pulls = [], []

    def counted(x):
        calls.append(1)
        return f(x)
    mt.jacfwd(counted)(X)
    assert len(calls) == X.size == 4

    real = jacobian.vjp

    def counting_vjp(*args):
        y, pull = real(*args)
        return y, lambda ct: pulls.append(1) or pull(ct)
    monkeypatch.setattr(jacobian, "vjp", counting_vjp)
    calls.clear()
    mt.jacrev(counted)(X)
    assert (len(calls), len(pulls)) == (1, 6)


@pytest.mark.parametrize("jac", [mt.jacfwd, mt.jacrev])
def test_shapes_are_the_outputs_then_the_inputs(jac):
    x = rng.standard_normal((3, 2))
    got = jac(lambda z: mt.matmul(A[:, :3], z))(x)      # y[i, j] = Σ A[i, k] z[k, j]
    assert got.shape == (6, 2, 3, 2)
    np.testing.assert_allclose(got, np.einsum("ik,jl->ijkl", A[:, :3], np.eye(2)))
    assert jac(mt.sum)(x).shape == (3, 2)
    assert jac(lambda z: z * x)(np.float64(2.0)).shape == (3, 2)


@pytest.mark.parametrize("jac", [mt.jacfwd, mt.jacrev])
def test_argnums_and_nested_arrays(jac):
    def g(p, s):
        return {"y": p["w"] * s, "z": [mt.sum(p["b"])]}
    p = {"w": rng.standard_normal(3), "b": rng.standard_normal(2)}
    got = jac(g)(p, 2.0)
    np.testing.assert_allclose(got["y"]["w"], 2 * np.eye(3))
    np.testing.assert_allclose(got["y"]["b"], np.zeros((3, 2)))
    np.testing.assert_allclose(got["z"][0]["b"], np.ones(2))
    np.testing.assert_allclose(jac(g, 1)(p, 2.0)["y"], p["w"])
    by_p, by_s = jac(g, (0, 1))(p, 2.0)["y"]
    np.testing.assert_allclose(by_p["w"], 2 * np.eye(3))
    np.testing.assert_allclose(by_s, p["w"])


def test_float32_stays_float32():
    x = X.astype(np.float32)
    for jac in (mt.jacfwd, mt.jacrev):
        assert jac(mt.exp)(x).dtype == np.float32


def test_a_constant_function_has_a_jacobian_of_zeros():
    for jac in (mt.jacfwd, mt.jacrev):
        np.testing.assert_array_equal(jac(lambda x: np.ones(2))(X), np.zeros((2, 4)))


def test_hessian_and_hvp_against_closed_forms():
    v = rng.standard_normal(4)
    np.testing.assert_allclose(mt.hessian(quartic)(X), H, rtol=1e-12)
    np.testing.assert_allclose(mt.jacrev(mt.jacrev(quartic))(X), H, rtol=1e-12)
    np.testing.assert_allclose(mt.jacfwd(mt.jacfwd(quartic))(X), H, rtol=1e-12)
    np.testing.assert_allclose(mt.hvp(quartic, X, v), H @ v, rtol=1e-12)


def test_hessian_of_two_arguments_has_four_blocks():
    g = lambda x, y: mt.sum(x * x * y)      # noqa: E731
    x, y = np.array([2.0, 3.0]), np.array([5.0, 7.0])
    (xx, xy), (yx, yy) = mt.hessian(g, (0, 1))(x, y)
    np.testing.assert_allclose(xx, np.diag(2 * y))
    np.testing.assert_allclose(xy, np.diag(2 * x))
    np.testing.assert_allclose(yx, np.diag(2 * x))
    np.testing.assert_allclose(yy, np.zeros((2, 2)))


def test_hvp_costs_one_run_of_the_function():
    calls = []
    mt.hvp(lambda x: calls.append(1) or quartic(x), X, X)
    assert len(calls) == 1


def test_hvp_of_nested_arrays():
    p = {"a": np.float64(2.0), "b": X}
    v = {"a": np.float64(1.0), "b": np.zeros(4)}
    got = mt.hvp(lambda p: p["a"] ** 3.0 * mt.sum(p["b"]), p, v)
    assert got["a"] == pytest.approx(6 * 2.0 * X.sum())
    np.testing.assert_allclose(got["b"], np.full(4, 12.0))


@pytest.mark.parametrize("jac", [mt.jacfwd, mt.jacrev])
def test_jacobians_can_be_differentiated(jac):
    trace = lambda x: mt.sum(jac(lambda z: z * z * z)(x) * np.eye(4))       # noqa: E731
    np.testing.assert_allclose(mt.grad(trace)(X), 6 * X)
    t = mt.tensor(X, requires_grad=True)
    trace(t).backward()
    np.testing.assert_allclose(t.grad.numpy(), 6 * X)


def test_empty_inputs_and_outputs_are_named():
    with pytest.raises(ValueError, match=r"jacfwd: inputs of shapes \[\(0,\)\]"):
        mt.jacfwd(mt.sum)(np.ones(0))
    with pytest.raises(ValueError, match=r"jacfwd: inputs of shapes \[\]: there is none"):
        mt.jacfwd(lambda nothing: X)({})
    with pytest.raises(ValueError, match=r"jacrev: outputs of shapes \[\(0,\)\]"):
        mt.jacrev(lambda x: x[:0])(X)
    with pytest.raises(TypeError, match="int64"):
        mt.jacfwd(mt.sum)(np.arange(3))


def test_the_op_table_does_not_grow_with_the_size_of_a_jacobian():
    before = set(mt.OPS)
    mt.jacfwd(mt.exp)(np.ones(23))
    assert set(mt.OPS) == before
