"""custom_vjp, custom_jvp, stop_gradient, and every nesting of the transforms to third order."""

import contextlib
import itertools
import weakref

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist.autodiff.primitive import state

one = np.float64(1.0)


@mt.custom_vjp
def cube_v(x):
    return x * x * x


cube_v.defvjp(lambda x: (cube_v(x), {"x": x}), lambda kept, ct: (3.0 * kept["x"] * kept["x"] * ct,))


@mt.custom_jvp
def cube_j(x):
    return x * x * x


cube_j.defjvp(lambda primals, tangents: (cube_j(*primals), 3.0 * primals[0] * primals[0] * tangents[0]))


# ---------------------------------------------------------------- nesting

def by_jvp(f):
    return lambda x: mt.jvp(f, (x,), (one,))[1]


def by_vjp(f):
    return lambda x: mt.vjp(f, x)[1](one)[0]


def by_program(f):
    return lambda x: mt.linearize(f, x)[1](one)


def by_transpose(f):
    return lambda x: mt.linearize(f, x)[1].transpose(one)[0]


def by_tape(f):
    def derivative(x):      # eager, at level 0: only outermost
        t = mt.tensor(x, requires_grad=True)
        f(t).backward()
        return t.grad.item()
    return derivative


REVERSE = {"grad": mt.grad, "vjp": by_vjp, "jacrev": mt.jacrev, "transpose": by_transpose}
ALL = {**REVERSE, "jvp": by_jvp, "linearize": by_program, "jacfwd": mt.jacfwd}
FUNCTIONS = {"plain": lambda x: x * x * x, "checkpoint": mt.checkpoint(lambda x: x * x * x), "custom_vjp": cube_v,
             "custom_jvp": cube_j, "checkpoint of custom_jvp": mt.checkpoint(cube_j),
             "checkpoint of checkpoint": mt.checkpoint(mt.checkpoint(lambda x: x * x * x))}


@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize("order", [1, 2, 3])
def test_any_nesting_to_third_order(kind, order):
    """Derivatives of exp(x³)·x, by every sequence of transforms."""
    cube = FUNCTIONS[kind]
    x = np.float64(0.6)
    e = np.exp(x ** 3)
    expected = {1: (1 + 3 * x**3) * e, 2: (12 * x**2 + 9 * x**5) * e, 3: (24 * x + 81 * x**4 + 27 * x**7) * e}[order]
    forward = kind != "custom_vjp"
    tried = 0
    for names in itertools.product(ALL if forward else ("grad", "vjp", "jacrev"), repeat=order):
        f = lambda x: mt.exp(cube(x)) * x       # noqa: E731
        for name in names:
            f = ALL[name](f)
        assert float(f(x)) == pytest.approx(expected, rel=1e-10), names
        tried += 1
    assert tried == (7 if forward else 3) ** order
    assert state.level == 0


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_the_eager_tape_around_a_transform_and_to_third_order_by_itself(kind):
    cube, x = FUNCTIONS[kind], np.float64(0.6)
    f = lambda x: mt.exp(cube(x)) * x       # noqa: E731
    third = (24 * x + 81 * x**4 + 27 * x**7) * np.exp(x ** 3)
    for inner in (mt.grad, by_vjp):
        assert by_tape(inner(mt.grad(f)))(x) == pytest.approx(third, rel=1e-10)
    t = mt.tensor(x, requires_grad=True)
    y = f(t)
    for _ in range(3):
        y.backward(create_graph=True)
        y, t.grad = t.grad, None
    assert y.item() == pytest.approx(third, rel=1e-10)


@pytest.mark.parametrize("outer, inner", list(itertools.product(ALL, ALL)))
@pytest.mark.parametrize("wrap", [lambda f: f, mt.checkpoint], ids=["plain", "checkpoint"])
def test_no_perturbation_confusion(outer, inner, wrap):
    """d/dx [x · d/dy (x + y)] = 1; confusing the two gives 2. And d/dx [x · d/dy (x y²) at y = 1] = 4x."""
    x = np.float64(3.0)
    f = wrap(lambda x: x * ALL[inner](wrap(lambda y: x + y))(one))
    assert float(ALL[outer](f)(x)) == 1.0
    g = wrap(lambda x: x * ALL[inner](wrap(lambda y: x * y * y))(one))
    assert float(ALL[outer](g)(x)) == pytest.approx(12.0)


# ---------------------------------------------------------------- custom_vjp

def test_the_rule_speaks_and_not_the_function():
    @mt.custom_vjp
    def clipped(x, limit):
        return mt.exp(x)
    clipped.defvjp(lambda x, limit: (mt.exp(x), (x, limit)), lambda kept, ct: (mt.clip(ct, -kept[1], kept[1]), None))
    x = mt.tensor(np.array([1.0, 2.0]), requires_grad=True)
    y = clipped(x, 0.5)
    np.testing.assert_array_equal(y.numpy(), np.exp([1.0, 2.0]))
    y.backward(np.array([0.2, 3.0]))
    np.testing.assert_array_equal(x.grad.numpy(), [0.2, 0.5])
    np.testing.assert_array_equal(mt.vjp(lambda x: clipped(x, 0.5), x.numpy())[1](np.array([0.2, 3.0]))[0], [0.2, 0.5])


def test_trees_of_arguments_outputs_and_residuals():
    @mt.custom_vjp
    def f(p, x, unused=None):
        return {"y": p["w"] * x, "z": p["b"]}

    def backward(kept, ct):
        (x, [w]) = kept["these"]
        return {"w": ct["y"] * x, "b": None}, ct["y"] * w, None
    f.defvjp(lambda p, x, unused: (f(p, x), {"these": (x, [p["w"]])}), backward)
    w, b, x = (mt.tensor(np.array(v), requires_grad=True) for v in ([2.0, 3.0], [1.0], [5.0, 7.0]))
    out = f({"w": w, "b": b}, x, None)
    out["y"].sum().backward()
    np.testing.assert_array_equal(w.grad.numpy(), [5.0, 7.0])
    np.testing.assert_array_equal(x.grad.numpy(), [2.0, 3.0])
    assert b.grad is None


def test_integers_among_the_arguments():
    @mt.custom_vjp
    def power(x, n, rows):
        return x[rows] ** float(n)

    def backward(kept, ct):
        x, n, rows = kept
        return mt.scatter_add(n * x[rows] ** (n - 1.0) * ct, rows, x.shape), None, None
    power.defvjp(lambda x, n, rows: (x[rows] ** float(n), (x, n, rows)), backward)
    x, rows = np.array([2.0, 3.0, 5.0]), np.array([2, 0])
    np.testing.assert_allclose(mt.grad(lambda x: mt.sum(power(x, 3, rows)))(x), [12.0, 0, 75.0])

    @mt.custom_jvp
    def power_j(x, n, rows):
        return x[rows] ** float(n)

    def rule(primals, tangents):
        x, n, rows = primals
        assert tangents[1] == 0 and not tangents[2].any()
        return power_j(x, n, rows), n * x[rows] ** (n - 1.0) * tangents[0][rows]
    power_j.defjvp(rule)
    np.testing.assert_allclose(mt.grad(lambda x: mt.sum(power_j(x, 3, rows)))(x), [12.0, 0, 75.0])
    np.testing.assert_allclose(mt.jvp(lambda x: power_j(x, 3, rows), (x,), (x,))[1], [375.0, 24.0])


def test_create_graph_runs_forward_again_so_that_the_rule_hangs_on_the_inputs():
    calls = []

    @mt.custom_vjp
    def square(x):
        return x * x
    square.defvjp(lambda x: calls.append(1) or (x * x, x), lambda x, ct: (2.0 * x * ct,))
    x = mt.tensor(np.array([3.0]), requires_grad=True)
    y = square(x).sum()
    y.backward(retain_graph=True)
    assert len(calls) == 1
    x.grad = None
    y.backward(create_graph=True)
    assert len(calls) == 2
    g, x.grad = x.grad, None
    g.sum().backward()
    assert x.grad.tolist() == [2.0]


def simple(backward, forward=lambda x, w: (x * w, (x, w))):
    @mt.custom_vjp
    def product(x, w):
        return x * w
    return product.defvjp(forward, backward)


@pytest.mark.parametrize("backward, error, message", [
    (lambda r, ct: ct, TypeError, "'product' must return a tuple.*ndarray"),
    (lambda r, ct: (ct,), ValueError, "'product' returned 1 cotangents for 2 arguments"),
    (lambda r, ct: (ct, ct[:1]), ValueError, r"argument 1 from the backward of 'product' has shape \(1,\).*\(2,\)"),
    (lambda r, ct: (ct.astype(np.float32), None), ValueError, "argument 0 .* float32.*float64"),
    (lambda r, ct: (1.0, None), ValueError, "argument 0 .* a float"),
    (lambda r, ct: 1 / 0, ZeroDivisionError, "division"),
])
def test_a_wrong_rule_is_named_and_leaves_the_engine_usable(backward, error, message):
    x, w = (mt.tensor(np.ones(2), requires_grad=True) for _ in range(2))
    with pytest.raises(error, match=message):
        simple(backward)(x, w).sum().backward()
    with pytest.raises(error, match=message):
        mt.grad(lambda x, w: mt.sum(simple(backward)(x, w)), (0, 1))(np.ones(2), np.ones(2))
    assert state.level == 0 and mt.is_grad_enabled()
    (x * w).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), np.ones(2))


def test_misuse_is_named():
    x = mt.tensor(np.ones(2), requires_grad=True)
    with pytest.raises(TypeError, match="'f' has no rule yet.*defvjp"):
        mt.custom_vjp(rename(lambda x: x, "f"))(x)
    with pytest.raises(TypeError, match="'f' has no rule yet.*defjvp"):
        mt.custom_jvp(rename(lambda x: x, "f"))(x)
    with pytest.raises(TypeError, match="'cube_v' has a reverse rule only"):
        mt.jvp(cube_v, (one,), (one,))
    for forward in (lambda x, w: x * w, lambda x, w: (x * w, x, w)):
        with pytest.raises(TypeError, match="must return a pair"):
            simple(None, forward)(x, x)
    with pytest.raises(TypeError, match="'cube_j' has a derivative given by hand"):
        mt.linear_transpose(cube_j, one)


@pytest.mark.parametrize("argument, cotangent", [
    (lambda x: {"w": x}, lambda ct: {"v": ct}), (lambda x: [x], lambda ct: [ct, ct]), (lambda x: (x,), lambda ct: 3.0)],
    ids=["another key", "too many", "no list"])
def test_a_cotangent_that_is_nested_unlike_its_argument_is_named(argument, cotangent):
    def f(tree):
        return next(iter(tree.values() if isinstance(tree, dict) else tree)) * 2.0
    ruled = mt.custom_vjp(f).defvjp(lambda tree: (f(tree), None), lambda r, ct: (cotangent(ct),))
    with pytest.raises(ValueError, match="backward of 'f' returned a cotangent that is nested unlike its argument"):
        ruled(argument(mt.tensor(np.ones(2), requires_grad=True))).sum().backward()


def rename(f, name):
    f.__name__ = name
    return f


@pytest.mark.parametrize("before", [
    mt.sin, mt.checkpoint(mt.sin), mt.custom_vjp(lambda x: 2 * x).defvjp(lambda x: (2 * x, None), lambda r, ct: (ct,)),
    mt.custom_jvp(lambda x: 3 * x).defjvp(lambda p, t: (3 * p[0], 3 * t[0])), lambda x: mt.layer_norm(x, 2),
    lambda x: x.split((1, 1))[0]], ids=["op", "checkpoint", "custom_vjp", "custom_jvp", "fused", "several"])
def test_nothing_goes_on_from_an_argument_that_gets_no_cotangent(before):
    def f(y, x):
        return y.sum() + x.sum()
    cut = mt.custom_vjp(f).defvjp(lambda y, x: (f(y, x), None), lambda r, ct: (None, ct * np.ones(2)))
    x = mt.tensor(np.array([0.2, 0.5]), requires_grad=True)
    for create in (False, True):
        cut(before(x), x).backward(create_graph=create)
    np.testing.assert_array_equal(x.grad.numpy(), [2.0, 2.0])
    np.testing.assert_array_equal(mt.grad(lambda x: cut(before(x), x))(x.numpy()), [1.0, 1.0])


def test_a_value_from_around_the_rule_must_be_an_argument():
    x, w = (mt.tensor(np.ones(2), requires_grad=True) for _ in range(2))
    f = mt.custom_vjp(rename(lambda x: x * w, "f")).defvjp(lambda x: (x * w, None), lambda r, ct: (ct * w,))
    with pytest.raises(TypeError, match="'f' reads a value from around it that is being differentiated"):
        f(x)
    w.requires_grad_(False)
    f(x).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), np.ones(2))
    assert isinstance(x.grad.data, np.ndarray)      # and no tensor in a tensor


def test_residuals_that_were_overwritten_raise():
    x, w = mt.tensor(np.ones(2), requires_grad=True), mt.tensor(np.ones(2))
    y = simple(lambda r, ct: (ct * r[1], None))(x, w).sum()
    w[0] = 3.0
    with pytest.raises(RuntimeError, match="backward of 'product' needs its 'residual'.*in-place assignment"):
        y.backward()
    y = simple(lambda r, ct: (ct * 2.0, None), lambda x, w: (x * w, None))(x, w).sum()
    w[0] = 4.0
    y.backward(retain_graph=True)       # needs no argument; differentiating it again does
    with pytest.raises(RuntimeError, match="second derivative of 'product' needs its argument.*in-place assignment"):
        y.backward(create_graph=True)
    scaled = mt.custom_jvp(rename(lambda x, w: x * w, "scaled")).defjvp(lambda p, t: (p[0] * p[1], t[0] * p[1]))
    y = scaled(x, w).sum()
    w[0] = 5.0
    with pytest.raises(RuntimeError, match="backward of 'scaled' needs its 'residual'.*in-place assignment"):
        y.backward()


def test_what_a_rule_kept_goes_when_backward_has_used_it():
    x = mt.tensor(np.ones(2), requires_grad=True)
    kept = []

    def forward(x, w):
        kept.append(np.ones(1000))
        return x * w, (kept[0], x, w)
    y = simple(lambda r, ct: (ct * r[2], ct * r[1]), forward)(x, x).sum()
    alive = weakref.ref(kept.pop())
    assert alive() is not None
    y.backward()
    assert alive() is None
    with pytest.raises(RuntimeError, match="a second time"):
        y.backward()


# ---------------------------------------------------------------- what is kept

def twisted():
    """x sin(w), its rule for reverse mode and that for both."""
    @mt.custom_vjp
    def v(x, w):
        return x * mt.sin(w)

    @mt.custom_jvp
    def j(x, w):
        return x * mt.sin(w)
    v.defvjp(lambda x, w: (x * mt.sin(w), {"of": (x, [w, None])}),
             lambda kept, ct: (ct * mt.sin(kept["of"][1][0]),
                               mt.sum(ct * kept["of"][0] * mt.cos(kept["of"][1][0]), 0)))
    j.defjvp(lambda p, t: (p[0] * mt.sin(p[1]), t[0] * mt.sin(p[1]) + t[1] * p[0] * mt.cos(p[1])))      # keeps p[0]
    return {"vjp": v, "jvp": j}


@pytest.mark.parametrize("kind", ["vjp", "jvp"])
def test_what_a_rule_keeps_goes_through_hooks_and_nothing_else_keeps_it(kind):
    f, random = twisted()[kind], np.random.default_rng(2)
    arrays = [random.standard_normal(shape) for shape in ((5, 3), (3,))]
    alive, packed = [], []

    def pack(array):
        packed.append(array.shape)
        return array.tolist()
    found = {}
    for hooks in (False, True):
        x, w = (mt.tensor(a, requires_grad=True) for a in arrays)
        with mt.saved_tensors_hooks(pack, np.array) if hooks else contextlib.nullcontext():
            h = mt.exp(x)
            alive.append(weakref.ref(h.data))
            y = f(h, w).sum()
        del h
        assert (alive[-1]() is None) == hooks
        y.backward(retain_graph=True)
        found[hooks] = [x.grad.numpy().copy(), w.grad.numpy().copy()]
        x.grad = w.grad = None
        y.backward(create_graph=True)       # the argument alone serves, too
        g, x.grad, w.grad = w.grad, None, None
        (g * g).sum().backward()
        found[hooks] += [x.grad.numpy(), w.grad.numpy()]
    assert packed.count((5, 3)) >= 2 and (3,) in packed
    for a, b in zip(found[True], found[False], strict=True):
        np.testing.assert_array_equal(a, b)
    (x, w), e = arrays, np.exp(arrays[0])
    np.testing.assert_allclose(found[True][0], e * np.sin(w))
    np.testing.assert_allclose(found[True][1], (e * np.cos(w)).sum(0))
    np.testing.assert_allclose(found[True][3], -2 * (e.sum(0) ** 2 * np.cos(w) * np.sin(w)))


def test_no_array_outlives_its_use():
    """Outputs and arguments are held by nobody but their users: not by how they were nested."""
    x = mt.tensor(np.ones(4), requires_grad=True)
    f = mt.custom_vjp(rename(lambda a: (a[0] * 2.0,), "f")).defvjp(
        lambda a: ((a[0] * 2.0,), None), lambda _, ct: ([ct[0] * 2.0],))
    h = x + 1.0
    y, = f([h])
    refs = [weakref.ref(h.data), weakref.ref(y.data)]
    z = (y + 3.0).sum()         # needs neither
    del h, y
    assert refs[0]() is not None and refs[1]() is None      # an argument may be asked for again
    z.backward()
    assert refs[0]() is None
    np.testing.assert_array_equal(x.grad.numpy(), np.full(4, 2.0))


# ---------------------------------------------------------------- custom_jvp

def test_one_rule_serves_both_modes_and_several_outputs():
    @mt.custom_jvp
    def polar(r, phi):
        return r * mt.cos(phi), r * mt.sin(phi)

    def rule(primals, tangents):
        (r, phi), (dr, dphi) = primals, tangents
        c, s = mt.cos(phi), mt.sin(phi)
        return (r * c, r * s), (c * dr - r * s * dphi, s * dr + r * c * dphi)
    polar.defjvp(rule)
    r, phi = np.array([2.0, 3.0]), np.array([0.3, 0.5])
    expected = [np.stack([np.diag(np.cos(phi)), np.diag(-r * np.sin(phi))]),
                np.stack([np.diag(np.sin(phi)), np.diag(r * np.cos(phi))])]
    for jac in (mt.jacfwd, mt.jacrev):
        for got, want in zip(jac(polar, (0, 1))(r, phi), expected, strict=True):
            np.testing.assert_allclose(np.stack(got), want, atol=1e-12)
    t = mt.tensor(r, requires_grad=True)
    x, y = polar(t, phi)
    (x * x + y * y).sum().backward()
    np.testing.assert_allclose(t.grad.numpy(), 2 * r)


@pytest.mark.parametrize("rule, error, message", [
    (lambda p, t: (p[0], t[0] * t[0]), TypeError, "'mul' is not linear"),
    (lambda p, t: (p[0], t[0] + 1.0), TypeError, "'add' adds a constant"),
    (lambda p, t: (p[0], p[0]), TypeError, "'f' returned a tangent that doesn't depend"),
    (lambda p, t: (p[0], t[0][:1]), ValueError, r"the tangent from the rule of 'f' has shape \(1,\).*\(2,\)"),
    (lambda p, t: p[0], TypeError, "must return a pair"),
    (lambda p, t: (p[0], t[0], None), TypeError, "must return a pair"),
    (lambda p, t: ((p[0], p[0]), t[0]), ValueError, "2 outputs and 1 tangents"),
])
def test_a_rule_that_is_not_linear_or_does_not_fit_is_named(rule, error, message):
    f = mt.custom_jvp(rename(lambda x: x * 1.0, "f")).defjvp(rule)
    with pytest.raises(error, match=message):
        f(mt.tensor(np.ones(2), requires_grad=True))
    assert state.level == 0


# ---------------------------------------------------------------- stop_gradient

def test_stop_gradient_stops_all_levels_and_modes():
    f = lambda x: mt.sum(mt.stop_gradient({"a": [x * x]})["a"][0] * x)     # noqa: E731
    x = np.array([2.0, 3.0])
    np.testing.assert_allclose(mt.grad(f)(x), x * x)
    np.testing.assert_allclose(mt.jvp(f, (x,), (np.ones(2),))[1], (x * x).sum())
    np.testing.assert_allclose(mt.linearize(f, x)[1].transpose(one)[0], x * x)
    np.testing.assert_allclose(mt.hessian(f)(x), np.zeros((2, 2)))
    t = mt.tensor(x, requires_grad=True)
    stopped = mt.stop_gradient(t)
    assert not stopped.requires_grad and isinstance(stopped, mt.Tensor)
    f(t).backward()
    np.testing.assert_allclose(t.grad.numpy(), x * x)
    outer = mt.grad(lambda x: mt.grad(lambda y: y * mt.stop_gradient(x * y))(one) * x)
    assert outer(np.float64(3.0)) == pytest.approx(3.0)      # stopped inside, x is no function of x any more
    assert mt.stop_gradient(3) == 3
