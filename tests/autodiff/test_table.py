"""Every entry of the op table, in every mode, against finite differences and against each other."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist.autodiff.tree import flatten

from .samples import CONSTANT, SAMPLES, entries

by_id = pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.id)


def test_every_entry_has_a_sample():
    assert entries() == entries() & ({s.covers for s in SAMPLES} | CONSTANT.keys())


def test_samples_run_the_entry_that_they_cover():
    for s in SAMPLES:
        if s.covers not in mt.OPS:
            continue    # composed of others
        used = set()
        out = s.function(*[mt.tensor(a, requires_grad=True) for a in s.args])
        stack = [out.node]
        while stack:
            node = stack.pop()
            if node is not None and node.primitive is not None:
                used.add(node.primitive.name)
                stack.extend(node.parents)
        assert s.covers in used | {"astype"}, f"{s.id} runs {sorted(used)}"


@by_id
def test_derivatives_equal_finite_differences_to_second_order(sample):
    mt.check_grads(sample.function, sample.args, order=2, name=sample.id)


@by_id
def test_tape_and_transform_agree(sample):
    leaves = [mt.tensor(a, requires_grad=True) for a in sample.args]
    y = sample.function(*leaves)
    u = np.random.default_rng(1).standard_normal(y.shape)
    y.backward(mt.tensor(u))
    value, pull = mt.vjp(sample.function, *sample.args)
    np.testing.assert_array_equal(value, y.numpy())
    for leaf, g in zip(leaves, pull(u), strict=True):
        np.testing.assert_allclose(leaf.grad.numpy(), g, rtol=1e-12, atol=1e-12)


@by_id
def test_transpose_identity(sample):
    """⟨u, Jv⟩ = ⟨Jᵀu, v⟩ for random u and v."""
    rng = np.random.default_rng(2)
    vs = [rng.standard_normal(a.shape) for a in sample.args]
    y, jv = mt.jvp(sample.function, sample.args, vs)
    u = rng.standard_normal(np.shape(y))
    _, pull = mt.vjp(sample.function, *sample.args)
    left, right = np.sum(u * jv), sum(np.sum(g * v) for g, v in zip(pull(u), vs, strict=True))
    assert abs(left - right) <= 1e-11 * max(1, abs(left))


@by_id
def test_hessian_vector_products_agree_in_three_orders_of_modes(sample):
    rng = np.random.default_rng(3)
    vs = tuple(rng.standard_normal(a.shape) for a in sample.args)
    u = rng.standard_normal(np.shape(sample.function(*map(mt.tensor, sample.args))))

    def number(*xs):
        return mt.sum(sample.function(*xs) * u)

    def gradient(*xs):
        return mt.grad(number, tuple(range(len(xs))))(*xs)

    forward_over_reverse = mt.jvp(gradient, sample.args, vs)[1]
    reverse_over_reverse = mt.vjp(gradient, *sample.args)[1](vs)
    reverse_over_forward = mt.grad(lambda *xs: mt.jvp(number, xs, vs)[1], tuple(range(len(vs))))(*sample.args)
    for a, b, c in zip(forward_over_reverse, reverse_over_reverse, reverse_over_forward, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(a, c, rtol=1e-9, atol=1e-9)


@by_id
def test_linearize_gives_jvp_and_its_transpose_vjp(sample):
    rng = np.random.default_rng(6)
    vs = [rng.standard_normal(a.shape) for a in sample.args]
    value, jv = mt.jvp(sample.function, sample.args, vs)
    u = rng.standard_normal(np.shape(value))
    y, program = mt.linearize(sample.function, *sample.args)
    np.testing.assert_allclose(y, value, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(program(*vs), jv, rtol=1e-12, atol=1e-12)
    for got, g in zip(program.transpose(u), mt.vjp(sample.function, *sample.args)[1](u), strict=True):
        np.testing.assert_allclose(got, g, rtol=1e-12, atol=1e-12)


LINEAR_SAMPLES = [s for s in SAMPLES if s.linear]


@pytest.mark.parametrize("sample", LINEAR_SAMPLES, ids=lambda s: s.id)
def test_linear_transpose_of_what_is_linear(sample):
    """In each argument, the others fixed; the example's values don't matter."""
    y = sample.function(*sample.args)
    u = np.random.default_rng(8).standard_normal(np.shape(y))
    expected = mt.vjp(sample.function, *sample.args)[1](u)
    for i, a in enumerate(sample.args):
        if sample.linear == "first" and i:
            break
        f = lambda x, i=i: sample.function(*sample.args[:i], x, *sample.args[i + 1:])   # noqa: E731
        got, = mt.linear_transpose(f, np.full(a.shape, np.nan))(u)
        np.testing.assert_allclose(got, expected[i], rtol=1e-12, atol=1e-12)


@by_id
def test_what_is_not_linear_is_refused(sample):
    """linear_transpose knows: a function that doubles along with its argument at random points, and no other."""
    x, (v, *_) = sample.args[0], [2 * a for a in sample.args]
    y, z = (np.asarray(sample.function(a, *sample.args[1:])) for a in (x, v))
    if not np.allclose(z, 2 * y):
        with pytest.raises(TypeError, match="linear"):
            mt.linear_transpose(lambda a: sample.function(a, *sample.args[1:]), x)


@by_id
def test_create_graph_gives_the_same_second_derivative(sample):
    rng = np.random.default_rng(4)
    vs = [rng.standard_normal(a.shape) for a in sample.args]
    leaves = [mt.tensor(a, requires_grad=True) for a in sample.args]
    y = sample.function(*leaves)
    u = rng.standard_normal(y.shape)
    (y * u).sum().backward(create_graph=True)
    grads = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    total = sum((g * v).sum() for g, v in zip(grads, vs, strict=True))
    if total.requires_grad:
        total.backward()

    def gradient(*xs):
        return mt.grad(lambda *zs: mt.sum(sample.function(*zs) * u), tuple(range(len(xs))))(*xs)
    for leaf, expected in zip(leaves, mt.jvp(gradient, sample.args, vs)[1], strict=True):
        got = leaf.grad.numpy() if leaf.grad is not None else 0
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)


@by_id
def test_float32_in_float32_out_and_float32_gradients(sample):
    if sample.covers == "astype":
        pytest.skip("a cast changes the dtype on purpose")
    leaves = [mt.tensor(a, dtype=np.float32, requires_grad=True) for a in sample.args]
    y = sample.function(*leaves)
    assert y.dtype == np.float32
    y.backward(mt.tensor(np.ones(y.shape, np.float32)))
    assert all(leaf.grad.dtype == np.float32 for leaf in leaves)
    directions = [np.ones(a.shape, np.float32) for a in sample.args]
    outs = mt.jvp(sample.function, [a.astype(np.float32) for a in sample.args], directions)
    assert all(o.dtype == np.float32 for o in flatten(outs)[0])


@by_id
def test_inputs_of_any_memory_layout_give_the_same_gradients(sample):
    def spread_out(a):      # the same values, reversed and with gaps
        if a.ndim == 0:
            return a
        wide = np.full(tuple(2 * e for e in a.shape), np.nan)
        view = wide[tuple(slice(None, None, -2) for _ in a.shape)]
        view[...] = a
        return view

    u = np.random.default_rng(5).standard_normal(np.shape(sample.function(*map(mt.tensor, sample.args))))
    plain = mt.vjp(sample.function, *sample.args)[1](u)
    odd = mt.vjp(sample.function, *map(spread_out, sample.args))[1](u)
    for a, b in zip(plain, odd, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", sorted(CONSTANT))
def test_constants_pass_no_gradient(name):
    function = CONSTANT[name]
    two = len(mt.OPS[name].inputs) == 2
    x = mt.tensor(np.array([1.5, -0.5]), requires_grad=True)
    assert not (function(x, x * 2) if two else function(x)).requires_grad
    # Inside a transform the rest of the function keeps its derivative.
    g = mt.grad(lambda z: mt.sum(z * z + function(z, 2 * z) * 1.0 if two else z * z + function(z) * 1.0))(x.numpy())
    np.testing.assert_allclose(g, 2 * x.numpy())


def test_an_op_of_ones_own_is_called_with_its_inputs_and_what_follows_them():
    power = mt.Primitive("own_power", lambda x, n: x ** n, params="n", listed=False,
                         x=(mt.LINEAR["scale"], lambda x, n: n * x ** (n - 1)))
    mt.check_grads(lambda x: power(x, 3), [np.array([1.5, -0.5])])
    x = mt.tensor(np.array([1.5, -0.5]), requires_grad=True)
    power(x, 3).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), [6.75, 0.75])
    np.testing.assert_array_equal(power(np.array([2.0]), 3), [8.0])


@pytest.mark.parametrize("rule", ["scale", mt.LINEAR["scale"], (lambda c, x: c * x, "x"), ("scale", "x")])
def test_a_rule_that_is_none_is_named(rule):
    with pytest.raises(TypeError, match=r'own: the rule of x is .* must be a LinearOp and its residual, x=\(mt.LINEAR'):
        mt.Primitive("own", np.tanh, x=rule)
    assert "own" not in mt.OPS


def test_arguments_that_are_no_list_are_named():
    with pytest.raises(TypeError, match=r"args is a ndarray, and must be a list of f's arguments: \[x\]"):
        mt.check_grads(mt.tanh, np.ones(3))
