"""checkpoint: the same bits for less memory."""

import contextlib
import copy
import gc
import pickle
import weakref

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import backend, nn

rng = np.random.default_rng(0)


def parameters(n, seed=1):
    r = np.random.default_rng(seed)
    return [mt.tensor(0.5 * r.standard_normal((5, 5)), requires_grad=True) for _ in range(n)]


def layers(ws, wrap=lambda f: f):
    """A chain of layers in segments of two, each closing over its parameters."""
    def segment(k):
        return wrap(lambda h: mt.tanh(mt.tanh(h @ ws[k]) @ ws[k + 1]))
    segments = [segment(k) for k in range(0, len(ws), 2)]

    def run(x):
        for s in segments:
            x = s(x)
        return x
    return run


def gradients(wrap, x):
    ws = parameters(6)
    y = layers(ws, wrap)(x)
    (y * y).sum().backward()
    return [y.numpy().copy(), *(w.grad.numpy().copy() for w in ws)]


# ---------------------------------------------------------------- the same bits

def test_results_and_gradients_are_equal_to_the_bit():
    x = mt.tensor(rng.standard_normal((3, 5)))
    for plain, again in zip(gradients(lambda f: f, x), gradients(mt.checkpoint, x), strict=True):
        np.testing.assert_array_equal(plain, again)


def test_the_segment_runs_twice_and_only_where_something_is_recorded():
    calls = []
    f = mt.checkpoint(lambda x: calls.append(1) or mt.exp(x))
    x = mt.tensor(np.ones(2), requires_grad=True)
    y = f(x).sum()
    assert len(calls) == 1
    y.backward()
    assert len(calls) == 2
    f(np.ones(2))
    with mt.no_grad():
        assert not f(x).requires_grad
    assert len(calls) == 4


def test_nested_outputs_and_outputs_that_are_no_tensors():
    @mt.checkpoint
    def f(x, scale=1.0):
        return {"a": [mt.sin(x) * scale, x * x], "b": mt.sum(x), "3": 3, "aa": x > 0.0}
    x = mt.tensor(rng.standard_normal(4), requires_grad=True)
    out = f(x, scale=2.0)
    assert out["3"] == 3 and not out["aa"].requires_grad
    assert out["b"].node.parents[0].primitive.name == "checkpoint(f)"
    (out["a"][0].sum() + out["b"] * 3.0).backward()         # one of the outputs is not used
    np.testing.assert_allclose(x.grad.numpy(), 2 * np.cos(x.numpy()) + 3)


def test_checkpoints_in_checkpoints():
    calls = []

    def f(x):
        calls.append(1)
        return mt.tanh(x)
    inner = mt.checkpoint(f)
    outer = mt.checkpoint(lambda x: inner(inner(x)))
    x = mt.tensor(rng.standard_normal(4), requires_grad=True)
    y = outer(outer(x))
    y.sum().backward()
    z = mt.tensor(x.numpy(), requires_grad=True)
    f(f(f(f(z)))).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), z.grad.numpy())
    assert len(calls) == 4 + 4 + 4 + 4      # forward, again by the outer, again by the inner; and z's


def test_a_parameter_of_two_segments_has_one_gradient_and_one_call_of_each_hook():
    w = mt.tensor(rng.standard_normal((3, 3)), requires_grad=True)
    f = mt.checkpoint(lambda x: mt.tanh(x @ w))
    x = np.ones((2, 3))
    ready, seen = [], []
    w.register_post_accumulate_grad_hook(lambda t: ready.append(t.grad.numpy().copy()))
    w.register_hook(lambda g: seen.append(g.numpy().copy()))
    f(f(mt.tensor(x))).sum().backward()
    expected = mt.grad(lambda w: mt.sum(mt.tanh(mt.tanh(x @ w) @ w)))(w.numpy())
    assert len(ready) == len(seen) == 1
    np.testing.assert_allclose(ready[0], expected)
    np.testing.assert_allclose(seen[0], expected)


def test_a_hook_before_a_segment_is_called_once_and_may_replace():
    x = mt.tensor(np.ones(3), requires_grad=True)
    h = x * 2.0
    calls = []
    h.register_hook(lambda g: calls.append(1) or g * 10.0)
    (mt.checkpoint(mt.exp)(h) + h).sum().backward()
    assert calls == [1]
    np.testing.assert_allclose(x.grad.numpy(), 20 * (np.exp(2.0) + 1) * np.ones(3))


# ---------------------------------------------------------------- random numbers

def masks(layer_wrap, scope):
    drop, seen = nn.Dropout(0.5), []

    def f(x):
        y = drop(x)
        seen.append(y.numpy() != 0)
        return mt.tanh(y)
    mt.manual_seed(3)
    x = mt.tensor(np.ones((4, 16)), requires_grad=True)
    with scope():
        y = layer_wrap(f)(x)
        after_forward = drop(mt.tensor(np.ones((4, 16)))).numpy() != 0
        y.sum().backward()
        after_backward = drop(mt.tensor(np.ones((4, 16)))).numpy() != 0
    return seen, after_forward, after_backward, x.grad.numpy()


@pytest.mark.parametrize("scope", [lambda: backend.random_scope(0, 1, 4, (0, 4), 2),
                                   contextlib.nullcontext], ids=["scope", "default stream"])
def test_dropout_has_the_same_mask_twice_and_later_draws_are_undisturbed(scope):
    plain, forward, backward, grad = masks(lambda f: f, scope)
    seen, forward2, backward2, grad2 = masks(mt.checkpoint, scope)
    assert len(seen) == 2
    np.testing.assert_array_equal(seen[0], seen[1])
    np.testing.assert_array_equal(seen[0], plain[0])
    assert 0 < plain[0].mean() < 1
    np.testing.assert_array_equal(forward, forward2)
    np.testing.assert_array_equal(backward, backward2)
    np.testing.assert_array_equal(grad, grad2)


def test_backward_after_the_random_scope_has_ended():
    drop = nn.Dropout(0.5)
    x = mt.tensor(np.ones((4, 16)), requires_grad=True)
    with backend.random_scope(0, 1, 4, (0, 4)):
        y = mt.checkpoint(drop)(x)
    y.sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), y.numpy())
    assert backend.random_state.scope is None


# ---------------------------------------------------------------- higher order and transforms

def f3(x, wrap):
    g = wrap(lambda z: mt.sin(z) * z)
    return mt.sum(g(wrap(lambda z: z * z)(x)))


X = np.array([0.3, 0.7, 1.1])


def test_create_graph_through_it():
    got = []
    for wrap in (lambda f: f, mt.checkpoint):
        x = mt.tensor(X, requires_grad=True)
        f3(x, wrap).backward(create_graph=True)
        first = x.grad
        x.grad = None
        (first * first).sum().backward(create_graph=True)
        second = x.grad
        x.grad = None
        second.sum().backward()
        got.append([first.numpy(), second.numpy(), x.grad.numpy()])
    for plain, again in zip(*got, strict=True):
        np.testing.assert_allclose(again, plain, rtol=1e-12)


def test_functional_transforms_through_it():
    plain, again = (lambda x, w=w: f3(x, w) for w in (lambda f: f, mt.checkpoint))
    for d in (mt.grad, lambda f: lambda x: mt.hvp(f, x, X), mt.hessian, lambda f: mt.jacrev(mt.grad(f)),
              lambda f: lambda x: mt.jvp(f, (x,), (x,))[1], lambda f: lambda x: mt.linearize(f, x)[1](x),
              lambda f: mt.jacfwd(mt.grad(lambda x: mt.sum(mt.grad(f)(x) ** 2.0)))):
        np.testing.assert_allclose(d(again)(X), d(plain)(X), rtol=1e-12)


def test_a_pull_through_it_may_be_called_again_and_records_nothing_under_no_grad():
    w = mt.tensor(X, requires_grad=True)
    with mt.no_grad():
        _, pull = mt.vjp(mt.checkpoint(lambda x: mt.sin(x * w)), X)
        u = np.ones(3)
        first, second = pull(u)[0], pull(u)[0]
    np.testing.assert_array_equal(getattr(first, "data", first), getattr(second, "data", second))
    assert not getattr(first, "requires_grad", False)
    with mt.no_grad():      # what was not recorded the first time is not recorded by the second run either
        _, pull = mt.vjp(mt.checkpoint(lambda x: mt.exp(x + w)), X)
    assert not getattr(pull(u)[0], "requires_grad", False)


def test_no_grad_inside_it():
    def f(x):
        with mt.no_grad():
            constant = x * x
        return x * constant
    x = mt.tensor(X, requires_grad=True)
    mt.checkpoint(f)(x).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), X * X)


# ---------------------------------------------------------------- safety

def test_what_it_starts_from_must_not_be_overwritten():
    x, w, c = (mt.tensor(np.ones(3), requires_grad=g) for g in (True, True, False))
    for victim, args in ((w, (x,)), (c, (x, c)), (x * 2.0, None)):
        args = args or (victim,)
        y = mt.checkpoint(lambda x, c=1.0: mt.tanh(x * w) * c)(*args).sum()
        with mt.no_grad():
            victim[0] = 2.0
        with pytest.raises(RuntimeError, match=r"checkpoint\(<lambda>\)' needs its 'input'.*in-place assignment"):
            y.backward()


def test_a_second_run_that_goes_another_way_raises():
    generator = np.random.default_rng(0)
    constant = np.ones(3)
    x = mt.tensor(np.ones(3), requires_grad=True)
    y = mt.checkpoint(lambda x: x * generator.random(3))(x).sum()
    with pytest.raises(RuntimeError, match="second run gave other values.*a generator of its own"):
        y.backward()
    runs = []

    def once(x):        # the same values, which the second time nothing is known to have made
        runs.append(x)
        return mt.tanh(x) if len(runs) == 1 else mt.tanh(x).detach()
    y = mt.checkpoint(once)(x).sum()
    with pytest.raises(RuntimeError, match="second run gave other values"):
        y.backward()
    y = mt.checkpoint(lambda x: mt.tanh(x + constant))(x).sum()
    constant[1] = 2.0
    with pytest.raises(RuntimeError, match="second run gave other values"):
        y.backward()


def test_backward_twice_needs_retain_graph():
    x = mt.tensor(np.ones(3), requires_grad=True)
    y = mt.checkpoint(mt.exp)(x).sum()
    y.backward(retain_graph=True)
    y.backward()
    np.testing.assert_allclose(x.grad.numpy(), 2 * np.e * np.ones(3))
    with pytest.raises(RuntimeError, match="backward through .* a second time"):
        y.backward()


def test_an_exception_in_the_second_run_leaves_everything_as_it_was():
    calls = []

    def f(x):
        calls.append(1)
        if len(calls) == 2:
            raise ZeroDivisionError
        return x * backend.next_stream().random()
    mt.manual_seed(5)
    x = mt.tensor(np.ones(3), requires_grad=True)
    y = mt.checkpoint(f)(x).sum()
    before = backend.random_snapshot()
    with pytest.raises(ZeroDivisionError):
        y.backward(retain_graph=True)
    assert backend.random_snapshot() == before
    assert mt.is_grad_enabled() and mt.autodiff.primitive.state.level == 0
    y.backward()
    assert x.grad is not None


# ---------------------------------------------------------------- memory and size

def test_it_is_freed_by_reference_counting_and_lets_go_of_its_inputs():
    gc.collect()
    gc.disable()
    try:
        for use in (lambda y: None, lambda y: y.backward(), lambda y: y.backward(create_graph=True)):
            w = mt.tensor(np.ones((3, 3)), requires_grad=True)
            h = mt.exp(w)
            y = mt.checkpoint(lambda x, w=w: mt.tanh(x @ w))(h).sum()
            node, array = weakref.ref(y.node), weakref.ref(h.data)
            del h
            use(y)
            if w.grad is not None and not w.grad.requires_grad:
                assert array() is None      # backward has used it, although y is still alive
            w.grad = None
            del y
            assert node() is None and array() is None
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_10000_segments_and_a_segment_of_10000():
    x = mt.tensor(np.full(2, 0.5), requires_grad=True)
    f = mt.checkpoint(lambda h: h * 1.0001)
    y = x
    for _ in range(10_000):
        y = f(y)
    y.sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), 1.0001 ** 10_000)

    @mt.checkpoint
    def long(h):
        for _ in range(10_000):
            h = h * 1.0001
        return h
    x.grad = None
    long(x).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), 1.0001 ** 10_000)

    x.grad = None
    wide = mt.checkpoint(lambda h: [h * float(i) for i in range(1000)])(x)
    sum(wide[1:], wide[0]).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), 499_500.0)


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_a_copied_module_runs_its_own_forward(twin_of):
    """And not the original's, with the original's parameters."""
    x, made = np.random.default_rng(1).standard_normal((2, 3)), []
    model = nn.Sequential(nn.Linear(3, 4, dtype=np.float64), nn.Tanh())
    model[0].forward = mt.checkpoint(model[0].forward, save=("linear",))
    twin = twin_of(model)
    plain = nn.Sequential(nn.Linear(3, 4, dtype=np.float64), nn.Tanh())
    for each in (twin, plain):
        for number, p in enumerate(each.parameters()):
            p.data[...] = np.random.default_rng(number).standard_normal(p.shape)
        each(x).sum().backward()
        made.append([p.grad.numpy() for p in each.parameters()])
    np.testing.assert_array_equal(twin(x).numpy(), plain(x).numpy())
    for mine, wanted in zip(*made, strict=True):
        np.testing.assert_array_equal(mine, wanted)
    assert all(p.grad is None for p in model.parameters())


def test_as_a_method():
    class Square:
        factor = 3.0

        @mt.checkpoint
        def __call__(self, x):
            """Its square."""
            return self.factor * x * x

        @mt.checkpoint
        def named(self, x):
            return self(x)
    x = mt.tensor(np.array([2.0]), requires_grad=True)
    Square().named(x).backward()
    assert x.grad.item() == 12 and Square.__call__.__doc__ == "Its square."
