"""Values of the ops against NumPy, shapes and edges."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import broadcastable_shapes, mutually_broadcastable_shapes

import minitorch_dist as mt

rng = np.random.default_rng(3)


@given(mutually_broadcastable_shapes(num_shapes=2, max_dims=4, max_side=3, min_side=0))
@settings(max_examples=60, deadline=None)
def test_any_broadcast_is_undone(shapes):
    a, b = (rng.standard_normal(s) for s in shapes.input_shapes)
    x, y = mt.tensor(a, requires_grad=True), mt.tensor(b, requires_grad=True)
    u = rng.standard_normal(shapes.result_shape)
    (x * y).backward(mt.tensor(u))
    # Independent: spell the broadcast out as copies and add the copies' gradients up, element by element.
    expected = np.zeros(a.shape)
    index = np.broadcast_to(np.arange(a.size).reshape(a.shape), shapes.result_shape)
    np.add.at(expected.reshape(-1), index.ravel(), (u * np.broadcast_to(b, shapes.result_shape)).ravel())
    np.testing.assert_allclose(x.grad.numpy(), expected, rtol=1e-12, atol=1e-12)


@given(broadcastable_shapes((2, 3), max_dims=2, max_side=3), st.integers(0, 3), st.integers(0, 3))
@settings(max_examples=20, deadline=None)
def test_matmul_of_any_batch(batch, m, n):
    batch = batch[:2]
    a, b = rng.standard_normal((*batch, m, 2)), rng.standard_normal((2, n))
    x = mt.tensor(a, requires_grad=True)
    y = x @ mt.tensor(b)
    np.testing.assert_allclose(y.numpy(), a @ b)
    u = rng.standard_normal(y.shape)
    y.backward(mt.tensor(u))
    np.testing.assert_allclose(x.grad.numpy(), np.einsum("...mn,kn->...mk", u, b), atol=1e-12)


@pytest.mark.parametrize("axis", [None, 0, 1, -1, (0, 2), (-1, 0), (2, 1, 0)])
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("name", ["sum", "mean", "max", "min", "var", "std"])
def test_reductions_equal_numpy(name, axis, keepdims):
    a = rng.standard_normal((2, 3, 4))
    got = getattr(mt, name)(mt.tensor(a), axis, keepdims=keepdims)
    np.testing.assert_allclose(got.numpy(), getattr(np, name)(a, axis=axis, keepdims=keepdims))


def test_ties_share_the_gradient_evenly():
    x = mt.tensor(np.array([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]]), requires_grad=True)
    mt.max(x, 1).backward(mt.tensor(np.array([1.0, 3.0])))
    np.testing.assert_allclose(x.grad.numpy(), [[0, 0.5, 0.5], [1, 1, 1]])
    a, b = mt.tensor(np.ones(2), requires_grad=True), mt.tensor(np.array([1.0, 2.0]), requires_grad=True)
    mt.maximum(a, b).sum().backward()
    np.testing.assert_allclose(a.grad.numpy(), [0.5, 0])
    np.testing.assert_allclose(b.grad.numpy(), [0.5, 1])


def test_subgradients_at_kinks_are_as_stated():
    x = mt.tensor(np.zeros(1), requires_grad=True)
    (mt.relu(x) + mt.absolute(x)).sum().backward()
    assert x.grad.numpy()[0] == 0.0


def test_a_nan_branch_that_where_does_not_take_stays_out_of_forward_mode():
    f = lambda x: mt.where(x > 0, mt.sqrt(x), 0.0)     # noqa: E731
    with np.errstate(divide="ignore", invalid="ignore"):
        _, t = mt.jvp(f, (np.array([0.0, 4.0]),), (np.ones(2),))
    np.testing.assert_allclose(t, [0.0, 0.25])


def test_where_gives_a_tensor_where_its_condition_is_one():
    a, x = np.array([0.5, -1.0]), mt.tensor(np.array([0.5, -1.0]))
    choose = lambda x: mt.where(x > 0, 1.0, 2.0)     # noqa: E731
    for f in (choose, mt.compile(choose)):
        assert isinstance(f(x), mt.Tensor) and np.array_equal(f(x).numpy(), [1.0, 2.0])
    assert isinstance(mt.where(x > 0, a, -a), mt.Tensor) and isinstance(choose(a), np.ndarray)
    np.testing.assert_array_equal(mt.grad(lambda x: mt.sum(choose(x) * x))(a), [1.0, 2.0])


def test_power_at_zero_and_below():
    x, y = mt.tensor(np.array([0.0, -2.0]), requires_grad=True), mt.tensor(np.array([2.0, 3.0]), requires_grad=True)
    mt.power(x, y).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), [0.0, 12.0])
    np.testing.assert_allclose(y.grad.numpy(), [0.0, 0.0])


def test_sigmoid_and_softmax_keep_their_digits_at_the_ends():
    x = np.array([-1e4, -50.0, 0.0, 50.0, 1e4])
    with np.errstate(all="raise", under="ignore"):
        s = mt.sigmoid(x)
        p = mt.softmax(x)
    np.testing.assert_allclose(s, [0.0, np.exp(-50.0), 0.5, 1.0, 1.0], rtol=1e-14)
    assert p[4] == 1.0 and np.isfinite(mt.log_softmax(x)).all()


@pytest.mark.parametrize("dtype, tolerance", [(np.float32, 1e-6), (np.float64, 1e-12)])
def test_cross_entropy_is_stable_and_right(dtype, tolerance):
    z = np.array([[1e4, -1e4, 0.0], [0.5, 1.0, -2.0]], dtype)
    labels = np.array([1, 0])
    x = mt.tensor(z, requires_grad=True)
    losses = mt.softmax_cross_entropy(x, labels)
    exact = np.log(np.exp(np.array([0.5, 1.0, -2.0])).sum()) - 0.5
    np.testing.assert_allclose(losses.numpy(), [2e4, exact], rtol=tolerance)
    losses.sum().backward()
    p = np.exp([0.5, 1.0, -2.0]) / np.exp([0.5, 1.0, -2.0]).sum()
    np.testing.assert_allclose(x.grad.numpy(), [[1, -1, 0], p - [1, 0, 0]], atol=tolerance)
    assert losses.dtype == dtype and x.grad.dtype == dtype


@pytest.mark.parametrize("logits, labels, error, message", [
    (np.ones((3, 4)), np.zeros(4, int), ValueError, r"\(3, 4\) and labels \(4,\)"),
    (np.ones((3, 4)), np.zeros((3, 1), int), ValueError, r"\(n,\)"),
    (np.ones((3, 4)), np.array([0, 4, 1]), ValueError, "from 0 to 4, but there are 4 classes"),
    (np.ones((3, 4)), np.array([0, -1, 1]), ValueError, "from -1"),
    (np.ones((3, 4)), np.zeros(3), TypeError, "float64"),
])
def test_cross_entropy_refuses_what_does_not_fit(logits, labels, error, message):
    with pytest.raises(error, match=message):
        mt.softmax_cross_entropy(logits, labels)


def test_a_fused_op_runs_its_kernel_once_and_its_definition_where_it_must():
    calls = []
    primitive = mt.OPS["softmax_cross_entropy"]
    forward, pullback = primitive.forward, primitive.pullback
    try:
        primitive.forward = lambda *a: calls.append("kernel") or forward(*a)
        primitive.pullback = lambda *a: calls.append("pullback") or pullback(*a)
        z, labels = rng.standard_normal((3, 4)), np.array([0, 3, 1])
        f = lambda x: mt.sum(mt.softmax_cross_entropy(x, labels))  # noqa: E731
        x = mt.tensor(z, requires_grad=True)
        f(x).backward()
        assert calls == ["kernel", "pullback"]
        mt.jvp(f, (z,), (z,))
        assert calls == ["kernel", "pullback"]      # forward mode runs the definition
    finally:
        primitive.forward, primitive.pullback = forward, pullback


def test_linear_makes_no_gradient_that_nobody_wants(monkeypatch):
    products, real = [], np.matmul
    monkeypatch.setattr(np, "matmul", lambda *a, **k: products.append(a[0].shape) or real(*a, **k))
    w, b = (mt.tensor(rng.standard_normal(s), requires_grad=True) for s in ((2, 4), (2,)))
    y = mt.linear(rng.standard_normal((3, 4)), w, b)
    products.clear()
    y.sum().backward()
    assert len(products) == 1       # weight's only: the data wants none


@pytest.mark.parametrize("call, message", [
    (lambda: mt.linear(np.ones((2, 3)), np.ones((4, 5)), np.ones(4)), r"x \(2, 3\), weight \(4, 5\)"),
    (lambda: mt.matmul(np.ones(()), np.ones((2, 2))), "0-d operands"),
    (lambda: mt.reshape(np.ones(6), (4, -1)), r"\(6,\) into \(4, -1\)"),
    (lambda: mt.reshape(np.ones(6), -6), r"\(6,\) into \(-6,\)"),
    (lambda: mt.reshape(np.ones(6), (-1, -2, 3)), r"into \(-1, -2, 3\)"),
    (lambda: mt.tensor(np.ones(3)).expand(-1, 3), r"expand: sizes \(-1, 3\) for shape \(3,\)"),
    (lambda: mt.tensor(np.ones(3)).split((4, -1)), "at least 0"),
    (lambda: mt.transpose(np.ones((2, 3)), (0, 0)), "not an order"),
    (lambda: mt.tensor(np.ones(6)).split((2, 3)), "add up to 5, axis 0 .* has 6"),
    (lambda: mt.broadcast_to(np.ones((1, 3)), (3,)), r"broadcast_to: shape \(3,\) has fewer axes than .* \(1, 3\)"),
    (lambda: mt.tensor(np.ones((2, 3))).at[0].set(np.ones((2, 1, 3))), r"shape \(3,\) has fewer axes"),
    (lambda: mt.sum(np.ones(3), (0, 0)), "twice"),
    (lambda: mt.sum(np.ones(3), 1), "out of range"),
    (lambda: mt.ops.indexing.At(np.ones(3))[np.array([0, 0])].set(1.0), "more than once"),
])
def test_errors_name_the_values(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_zero_size_arrays_pass_through():
    x = mt.tensor(np.zeros((0, 4)), requires_grad=True)
    w = mt.tensor(rng.standard_normal((3, 4)), requires_grad=True)
    b = mt.tensor(np.zeros(3), requires_grad=True)
    losses = mt.softmax_cross_entropy(mt.tanh(mt.linear(x, w, b)), np.zeros(0, int))
    losses.sum().backward()
    assert x.grad.shape == (0, 4)
    np.testing.assert_array_equal(w.grad.numpy(), np.zeros((3, 4)))


def test_at_set_and_add_leave_the_original_alone():
    x = mt.tensor(np.arange(6.0).reshape(2, 3))
    y = x.at[0, 1].set(9.0)
    assert x.numpy()[0, 1] == 1.0 and y.numpy()[0, 1] == 9.0
    np.testing.assert_array_equal(x.at[np.array([1, 1])].add(1.0).numpy(), [[0, 1, 2], [5, 6, 7]])


def test_at_set_takes_axes_of_one_as_numpys_assignment_does():
    x, value = np.zeros((2, 3)), mt.tensor([[[1.0, 2.0, 3.0]]], requires_grad=True)
    x[1] = value.numpy()
    y = mt.tensor(np.zeros((2, 3))).at[1].set(value)
    np.testing.assert_array_equal(y.numpy(), x)
    (y * np.array([4.0, 5.0, 6.0])).sum().backward()
    np.testing.assert_array_equal(value.grad.numpy(), [[[4, 5, 6]]])


def test_iteration_len_and_truth():
    x = mt.tensor(np.arange(6.0).reshape(2, 3), requires_grad=True)
    assert len(x) == 2 and [row.shape for row in x] == [(3,), (3,)]
    assert bool(x[0, 1] > 0.5) and float(x[1, 2]) == 5.0
    assert float(x[:1, 1:2]) == int(x[:1, 1:2]) == 1 and not bool(x[:1, 0]) and [7, 8][mt.tensor([1])] == 8
    with pytest.raises(TypeError):
        float(x)
    with pytest.raises(ValueError, match="ambiguous"):
        bool(x > 0)
