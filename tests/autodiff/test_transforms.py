"""Functional transforms: nesting, pytrees, errors."""

import re

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import nn
from minitorch_dist.autodiff.primitive import lower

one = np.float64(1.0)


def derivative(f, x):
    return mt.jvp(f, (x,), (one,))[1]


@pytest.mark.parametrize("d", [derivative, lambda f, x: mt.grad(f)(x)], ids=["forward", "reverse"])
@pytest.mark.parametrize("inner", [derivative, lambda f, x: mt.grad(f)(x)], ids=["forward", "reverse"])
def test_no_perturbation_confusion(d, inner):
    """d/dx [x · d/dy (x + y)] = 1; confusing the two perturbations gives 2. Source: Siskind & Pearlmutter 2005."""
    assert d(lambda x: x * inner(lambda y: x + y, one), one) == 1.0
    # And where the inner function uses the outer variable nonlinearly: d/dx [x · (x³)' at y = x, times x] = …
    assert d(lambda x: x * inner(lambda y: x * y * y, one), np.float64(3.0)) == pytest.approx(12.0)


@pytest.mark.parametrize("modes", [(a, b, c) for a in "fr" for b in "fr" for c in "fr"], ids="".join)
def test_third_derivatives_in_every_order_of_modes(modes):
    f = {"f": lambda g: lambda x: derivative(g, x), "r": mt.grad}
    g = mt.sin
    for mode in modes:
        g = f[mode](g)
    assert g(np.float64(0.3)) == pytest.approx(-np.cos(0.3), rel=1e-12)
    h = lambda x: mt.exp(x * x)     # noqa: E731
    for mode in modes:
        h = f[mode](h)
    assert h(np.float64(0.5)) == pytest.approx((12 * 0.5 + 8 * 0.125) * np.exp(0.25), rel=1e-12)


def test_nested_trees_in_and_out():
    def f(params, xs):
        w, (b, c) = params["w"], params["rest"]
        return {"y": mt.matmul(xs, w) + b, "z": [c * c]}

    rng = np.random.default_rng(0)
    params = {"w": rng.standard_normal((3, 2)), "rest": (rng.standard_normal(2), rng.standard_normal(()))}
    xs = rng.standard_normal((4, 3))
    out, pull = mt.vjp(lambda p: f(p, xs), params)
    u = {"y": rng.standard_normal((4, 2)), "z": [rng.standard_normal(())]}
    (g,) = pull(u)
    np.testing.assert_allclose(g["w"], xs.T @ u["y"])
    np.testing.assert_allclose(g["rest"][0], u["y"].sum(0))
    np.testing.assert_allclose(g["rest"][1], 2 * params["rest"][1] * u["z"][0])
    assert isinstance(g["rest"], tuple) and set(out) == {"y", "z"}


def test_argnums_aux_and_values():
    f = lambda a, b, k=1.0: mt.sum(a * b) * k   # noqa: E731
    a, b = np.array([1.0, 2.0]), np.array([3.0, 5.0])
    np.testing.assert_allclose(mt.grad(f, 1)(a, b), a)
    ga, gb = mt.grad(f, (0, 1))(a, b, k=2.0)
    np.testing.assert_allclose(ga, 2 * b)
    np.testing.assert_allclose(gb, 2 * a)
    (value, extra), g = mt.value_and_grad(lambda x: (mt.sum(x * x), "more"), has_aux=True)(a)
    assert value == 5.0 and extra == "more"
    np.testing.assert_allclose(g, 2 * a)


def test_gradients_of_functions_share_no_memory():
    """g *= 2 doubles one gradient, and no other, nor the cotangent."""
    a, b, c, ct = (np.full(shape, 1.0) for shape in ((2, 3), (3,), (6,), (2, 3)))

    def f(args):
        return args["a"] + args["b"] + mt.reshape(args["c"], (2, 3))
    args = {"a": a, "b": b, "c": c}
    pulls = (lambda: mt.vjp(f, args)[1](ct)[0], lambda: mt.linear_transpose(f, args)(ct)[0],
             lambda: mt.grad(lambda args: mt.sum(f(args)))(args))
    for pull in pulls:
        gs = pull()
        for g in gs.values():
            g *= 2
        for name, expected in (("a", 2.0), ("b", 4.0), ("c", 2.0)):
            np.testing.assert_array_equal(gs[name], np.full(args[name].shape, expected))
        assert (ct == 1).all() and not any(np.shares_memory(g, x) for g in gs.values() for x in args.values())
    tangents = {"a": ct, "b": np.full(3, 2.0), "c": np.full(6, 3.0)}
    _, program = mt.linearize(lambda args: (args["a"] + 1.0, args["a"]), args)
    for one, other in (mt.jvp(lambda args: (args["a"] + 1.0, args["a"]), (args,), (tangents,))[1], program(tangents)):
        one *= 2
        assert (other == 1).all() and (ct == 1).all()
    ga, gb = mt.grad(lambda x, y: mt.sum(x + y), (0, 1))(mt.tensor(b), mt.tensor(b))
    assert not np.shares_memory(ga.numpy(), gb.numpy())


@pytest.mark.parametrize("make", [mt.grad, mt.value_and_grad, mt.jacfwd, mt.jacrev, mt.checkpoint, mt.compile])
def test_what_is_no_function_is_told_at_once(make):
    w = mt.tensor([1.0, 2.0], requires_grad=True)
    with pytest.raises(TypeError, match=f"{make.__name__} takes a function and gives one, .*got a int$"):
        make(3)
    with pytest.raises(TypeError, match=f"{make.__name__} takes .*; got a Tensor; of what is computed already, a loss"):
        make(mt.sum(w * w))


@pytest.mark.parametrize("call, shown", [(mt.vjp, "f, *primals"), (mt.jvp, "f, primals, tangents"), (mt.hvp, "f, x, v"),
                                         (mt.linearize, "f, *primals"), (mt.linear_transpose, "f, *examples"),
                                         (mt.check_grads, "f, args")])
def test_what_is_no_function_is_told_where_it_comes_first(call, shown):
    x = np.ones(2)
    args = {"jvp": ((x,), (x,)), "hvp": (x, x), "check_grads": ((x,),)}.get(call.__name__, (x,))
    with pytest.raises(TypeError, match=re.escape(f"{call.__name__} takes a function first, {call.__name__}({shown}); "
                                                  "got a ndarray")):
        call(x, *args)


def test_a_checkpoint_is_no_call():
    for x in (np.ones((2, 2)), mt.tensor([1.0, 2.0]), mt.tensor(1.0)):
        with pytest.raises(TypeError, match=r"checkpoint\(f\)\(x\), and not checkpoint\(f, x\)"):
            mt.checkpoint(mt.sum, x)


@pytest.mark.parametrize("make", [mt.grad, mt.value_and_grad, mt.jacfwd, mt.jacrev, mt.hessian])
def test_an_argument_that_is_not_there_or_is_named_twice(make):
    a, b = np.ones(2), np.full(2, 3.0)

    def f(a, b):
        return mt.sum(a * b)
    for argnums, args, says in ((2, (a, b), "called with 2 arguments by position"), (-3, (a, b), r"argnums=\(-3,\)"),
                                (0, (), "called with 0 arguments"), ((0, 0), (a, b), "names an argument twice"),
                                ((1, -1), (a, b), r"argnums=\(1, -1\) names an argument twice")):
        with pytest.raises(ValueError, match=says):
            make(f, argnums)(*args)
    for back, front in ((-1, 1), (-2, 0)):
        for found, expected in zip(make(f, back)(a, b), make(f, front)(a, b), strict=True):
            np.testing.assert_array_equal(found, expected)


def test_unused_inputs_and_constant_functions_get_zeros():
    a = np.ones(3)
    ga, gb = mt.grad(lambda x, y: mt.sum(x * 2.0), (0, 1))(a, np.ones((2, 2)))
    np.testing.assert_array_equal(gb, np.zeros((2, 2)))
    np.testing.assert_array_equal(mt.grad(lambda x: np.float64(3.0))(a), np.zeros(3))
    y, t = mt.jvp(lambda x: np.float64(3.0), (a,), (a,))
    assert (y, t) == (3.0, 0.0)


def test_the_pullback_can_be_called_again():
    _, pull = mt.vjp(lambda x: mt.exp(x), np.zeros(2))
    np.testing.assert_array_equal(pull(np.array([1.0, 2.0]))[0], pull(np.array([1.0, 2.0]))[0])


def test_tensors_go_in_and_stay_on_the_outer_tape():
    x = mt.tensor(np.array([0.3, 0.7]), requires_grad=True)
    g = mt.grad(lambda z: mt.sum(mt.sin(z)))(x)
    np.testing.assert_allclose(g.numpy(), np.cos(x.numpy()))
    g.sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), -np.sin(x.numpy()))


def test_control_flow_by_value_works():
    def f(x):
        y = x
        while mt.sum(y) < 100:
            y = y * 2.0
        return mt.sum(y)
    assert mt.grad(f)(np.array([1.0]))[0] == 128.0


@pytest.mark.parametrize("call, error, message", [
    (lambda: mt.grad(lambda x: x * 2.0)(np.ones(3)), TypeError, r"one number.*shape \(3,\)"),
    (lambda: mt.grad(mt.sum)(np.array([1, 2])), TypeError, "int64"),
    (lambda: mt.jvp(mt.exp, (np.ones(3),), (np.ones(2),)), ValueError, r"\(2,\).*\(3,\)"),
    (lambda: mt.jvp(mt.exp, (np.ones(3),), (np.ones(1),)), ValueError, r"\(1,\) .* \(3,\) .*: they must be equal"),
    (lambda: mt.jvp(mt.exp, (np.ones(3),), (np.ones(3, np.float32),)), ValueError, "float32"),
    (lambda: mt.jvp(mt.mul, (one, one), (one,)), ValueError, "2 primals, 1 tangents"),
    (lambda: mt.vjp(mt.exp, np.ones(3))[1](np.ones(2)), ValueError, r"\(2,\).*\(3,\)"),
    (lambda: mt.vjp(lambda x: (x, x), one)[1]((one,)), ValueError, "2 outputs, got 1"),
])
def test_misuse_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("f", [mt.sum, lambda x: mt.sum(x * x), lambda x: mt.sum(x.detach())],
                         ids=["linear", "square", "constant"])
def test_a_gradient_is_of_its_inputs_kind(f):
    a = np.array([1.0, 2.0])
    assert isinstance(mt.grad(f)(a), np.ndarray) and isinstance(mt.grad(f)(mt.tensor(a)), mt.Tensor)
    assert np.array_equal(mt.grad(f)(mt.tensor(a)).numpy(), mt.grad(f)(a))


def test_what_is_detached_is_constant_on_all_levels():
    x = np.array([1.0, 2.0, -3.0])

    def f(x):
        return mt.sum(x.detach() * x * x)
    assert mt.grad(f)(x).tolist() == (2 * x * x).tolist()
    assert mt.grad(lambda x: mt.sum(mt.grad(f)(x)))(x).tolist() == (2 * x).tolist()
    assert mt.jvp(f, (x,), (np.ones(3),))[1].item() == (2 * x * x).sum()
    assert mt.hvp(f, x, np.ones(3)).tolist() == (2 * x).tolist()


OUT = {     # how numbers could leave a function that is differentiated, without their derivatives
    "tensor": lambda q: mt.sum(mt.tensor(q) ** 2), "Parameter": lambda q: mt.sum(nn.Parameter(q) ** 2),
    "float": lambda q: mt.sum(q) * 0 + float(q[0]), "item": lambda q: mt.sum(q) * 0 + q[0].item(),
    "tolist": lambda q: mt.sum(q) * 0 + q.tolist()[0], "numpy": lambda q: mt.sum(q) * 0 + q.numpy()[0],
    "eps": lambda q: mt.sum(mt.square(mt.layer_norm(np.arange(4.0), 4, eps=q[0]))),
    "p": lambda q: mt.sum(mt.dropout(np.arange(4.0), q[0] * 0.5)),
}
WAYS = {"grad": lambda f, x: mt.grad(f)(x), "jvp": lambda f, x: mt.jvp(f, (x,), (np.ones(2),)),
        "linearize": mt.linearize, "jacrev": lambda f, x: mt.jacrev(f)(x), "hvp": lambda f, x: mt.hvp(f, x, np.ones(2))}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("out", OUT)
def test_no_number_leaves_without_its_derivative(way, out):
    with pytest.raises(TypeError, match=r"a value inside a transform .* no fixed numbers .*mt.stop_gradient\(x\)"):
        WAYS[way](OUT[out], np.array([1.0, 0.5]))


@pytest.mark.parametrize("way", ["grad", "jvp"])
def test_an_array_that_is_filled_does_not_take_them_either(way):
    def f(q):
        out = np.zeros(2)
        for i in range(2):
            out[i] = q[i] ** 2
        return mt.sum(out) + 0 * mt.sum(q)
    with pytest.raises((TypeError, ValueError)):
        WAYS[way](f, np.ones(2))


@pytest.mark.parametrize("way", ["grad", "jvp"])
def test_numbers_that_are_meant_to_be_constants_or_to_be_looked_at(way, capsys):
    def f(q):
        total = mt.sum(q * q)
        print(f"{total:.2f}")
        if total > 1.0 and int(total) == 1:
            return total * float(mt.stop_gradient(total)) * total.detach().item()
    x = np.array([1.0, 0.5])
    found = WAYS[way](f, x)
    total = (x * x).sum()
    if way == "grad":
        np.testing.assert_allclose(found, 2 * x * total ** 2)
    else:
        np.testing.assert_allclose(found, (total ** 3, 2 * x.sum() * total ** 2))
    assert capsys.readouterr().out == "1.25\n"


def into_an_array(x):
    y = np.zeros(3)
    y += x
    return (y * y).sum()


@pytest.mark.parametrize("f, error, said", [
    (lambda x: ((x > 0).float() * x).sum(), AttributeError, r"mt\.tensor\(x > 0\)\.float"),
    (lambda x: (x.argmax() == 1).long() * x.sum(), AttributeError, r"mt\.tensor\(x > 0\)\.long"),
    (into_an_array, TypeError, r"write y = y \+ x for y \+= x"),
    (lambda x: np.exp(x).sum(), TypeError, r"mt\.exp\(x\) for np\.exp\(x\)")])
@pytest.mark.parametrize("transform", [
    mt.grad, lambda f: lambda x: mt.jvp(f, (x,), (x,)), lambda f: mt.grad(lambda x: (mt.grad(f)(x) ** 2).sum())],
    ids=["grad", "jvp", "nested"])
def test_what_numpy_refuses_in_a_transform_says_what_to_write(transform, f, error, said):
    with pytest.raises(error) as raised:
        transform(f)(np.array([1.0, -2.0, 3.0]))
    note, = raised.value.__notes__
    assert re.search(said, note)


def test_what_it_says_to_write_works():
    x = np.array([1.0, -2.0, 3.0])
    for f in (lambda x: (mt.tensor(x > 0).float() * x).sum(), lambda x: ((x > 0).astype(x.dtype) * x).sum(),
              lambda x: ((x > 0) * x).sum()):
        np.testing.assert_array_equal(lower(mt.grad(f)(x)), [1.0, 0.0, 1.0])
    with pytest.raises(AttributeError) as raised:     # somebody's own mistake has no note
        mt.grad(lambda x: np.ones(3).nonsense * x)(x)
    assert not hasattr(raised.value, "__notes__")
