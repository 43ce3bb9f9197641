"""Grad modes, hooks on gradients and on saved arrays, threads, and errors in the middle of things."""

import gc
import threading
import weakref

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist.autodiff import LinearOp, Primitive, dispatch
from minitorch_dist.autodiff.primitive import bind, state


def leaf(*values):
    return mt.tensor(np.array(values), requires_grad=True)


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    yield
    assert (state.level, state.off, state.pack, state.anomaly, state.counting, state.special, state.callbacks) == (
        0, -1, None, False, False, None, None)


# ---------------------------------------------------------------- no_grad, enable_grad

def test_enable_grad_inside_no_grad_and_both_as_decorators():
    x = leaf(1.0, 2.0)

    @mt.no_grad()
    def constant(x):
        assert not mt.is_grad_enabled()
        with mt.enable_grad():
            assert mt.is_grad_enabled() and (x * 2.0).requires_grad
        return x * 2.0

    @mt.enable_grad()
    def recorded(x):
        return x * 2.0
    for _ in range(2):      # a decorator must serve more than once
        assert not constant(x).requires_grad
        with mt.no_grad():
            assert recorded(x).requires_grad
            with mt.no_grad():
                pass
            assert not mt.is_grad_enabled()
    with pytest.raises(ZeroDivisionError), mt.no_grad():
        1 / 0       # noqa: B018
    assert mt.is_grad_enabled()


@pytest.mark.parametrize("context, general", [(mt.enable_grad, False), (mt.no_grad, False), (mt.detect_anomaly, True)])
def test_no_grad_leaves_ops_on_their_fast_paths(monkeypatch, context, general):
    """The general path costs twice as much: who generates or validates mustn't pay for it. (detect_anomaly must.)"""
    bound = []
    monkeypatch.setattr(dispatch, "bind",
                        lambda primitive, *args: bound.append(primitive.name) or bind(primitive, *args))
    x, w = leaf([1.0, 2.0]), mt.tensor(np.ones((2, 3)))
    with context():
        y = (mt.tanh(2.0 * x) @ w).sum(1)
        assert y.requires_grad is mt.is_grad_enabled()
    assert bound == (["mul", "tanh", "matmul", "sum"] if general else [])


def test_create_graph_records_under_no_grad_too():
    x = leaf(1.0, 2.0)
    y = (x * x * x).sum()
    with mt.no_grad():
        y.backward(create_graph=True)
    g, x.grad = x.grad, None
    g.sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), 6 * x.numpy())


def test_modes_and_levels_are_per_thread():
    """Threads in the middle of different transforms and modes, in lockstep, each with its own right answer."""
    barrier, results = threading.Barrier(4), {}

    def work(name, context, x):
        def f(z):
            barrier.wait(10)
            y = mt.sin(z) * z
            barrier.wait(10)
            return mt.sum(y)
        with context():
            barrier.wait(10)
            results[name] = (mt.is_grad_enabled(), state.anomaly, state.pack is not None,
                             mt.grad(lambda z: f(z) * 2.0)(x))
            barrier.wait(10)
    contexts = {"plain": mt.enable_grad, "off": mt.no_grad, "anomaly": mt.detect_anomaly,
                "packed": lambda: mt.saved_tensors_hooks(lambda a: a, lambda a: a)}
    threads = [threading.Thread(target=work, args=(name, c, np.arange(3.0) + i))
               for i, (name, c) in enumerate(contexts.items())]
    for t in threads:
        t.start()
    for t in threads:
        t.join(20)
    assert {name: r[:3] for name, r in results.items()} == {
        "plain": (True, False, False), "off": (False, False, False), "anomaly": (True, True, False),
        "packed": (True, False, True)}
    for i, name in enumerate(contexts):
        x = np.arange(3.0) + i
        np.testing.assert_allclose(results[name][3], 2 * (np.cos(x) * x + np.sin(x)))


# ---------------------------------------------------------------- hooks on gradients

@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_that_is_there_twice_is_taken_away_once(register):
    x, calls = leaf(1.0), []
    first, second = getattr(x, register)(calls.append), getattr(x, register)(calls.append)
    for handle, left in ((None, 2), (second, 1), (second, 1), (first, 0)):
        if handle is not None:
            handle.remove()
        calls.clear()
        (x * 2.0).sum().backward()
        assert len(calls) == left


def test_a_hook_sees_the_complete_gradient_and_may_replace_it():
    x = leaf(1.0, 2.0)
    h = x * 3.0
    seen = []
    h.register_hook(lambda g: seen.append(g.numpy().copy()))
    handle = h.register_hook(lambda g: g * 100.0)
    x.register_hook(lambda g: g + 1.0)
    ((h * 2.0).sum() + h.sum()).backward()
    np.testing.assert_array_equal(seen, [[3.0, 3.0]])
    np.testing.assert_array_equal(x.grad.numpy(), [901.0, 901.0])
    handle.remove()
    h2 = x * 3.0
    handle2 = h2.register_hook(lambda g: g * 0.0)
    handle2.remove()
    x.grad = None
    h2.sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), [4.0, 4.0])


def test_a_replacement_that_does_not_fit_raises():
    x = leaf(1.0, 2.0)
    x.register_hook(lambda g: g[:1])
    with pytest.raises(ValueError, match=r"shape \(1,\).*shape \(2,\)"):
        (x * 2.0).sum().backward()


def test_what_a_hook_keeps_is_not_changed_by_later_passes():
    x = leaf(1.0, 2.0)
    kept = []
    x.register_hook(kept.append)
    for _ in range(2):
        (x * x).sum().backward()
    np.testing.assert_array_equal(kept[0].numpy(), [2.0, 4.0])
    np.testing.assert_array_equal(x.grad.numpy(), [4.0, 8.0])


def test_hooks_in_a_transform_and_with_create_graph():
    def f(x):
        y = mt.sin(x)
        y.register_hook(lambda g: g * 10.0)
        return mt.sum(y)
    x = np.array([0.3, 0.7])
    np.testing.assert_allclose(mt.grad(f)(x), 10 * np.cos(x))
    t = mt.tensor(x, requires_grad=True)
    f(t).backward(create_graph=True)
    g, t.grad = t.grad, None
    g.sum().backward()
    np.testing.assert_allclose(t.grad.numpy(), -10 * np.sin(x))


def test_retain_grad_of_an_interior_tensor():
    x = leaf(1.0, 2.0)
    h = (x * 3.0).retain_grad()
    y = (h * h).sum()
    y.backward(retain_graph=True)
    np.testing.assert_array_equal(h.grad.numpy(), 2 * h.numpy())
    y.backward()
    np.testing.assert_array_equal(h.grad.numpy(), 4 * h.numpy())
    assert x.retain_grad() is x


def test_a_hook_that_knows_its_own_tensor_is_no_leak():
    """Such a hook makes a cycle, which only the collector can free; it must not be kept by the library itself."""
    y = leaf(1.0) * 2.0
    y.register_hook(lambda g, y=y: None)
    node = weakref.ref(y.node)
    del y
    gc.collect()
    assert node() is None


def test_hooked_graphs_are_freed_by_reference_counting():
    gc.collect()
    gc.disable()
    try:
        x = leaf(1.0, 2.0)
        y = mt.exp(x)
        y.register_hook(lambda g: g * 2.0)
        y.retain_grad()
        z = y.sum()
        nodes = [weakref.ref(t.node) for t in (y, z)]
        z.backward(create_graph=True)
        x.grad = None
        y.grad = None
        del y, z
        assert [n() for n in nodes] == [None, None]
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_backward_inside_a_transform_is_refused():
    def f(x):
        y = mt.sum(x * x)
        y.backward()
        return y
    with pytest.raises(RuntimeError, match="inside a transform.*use grad"):
        mt.grad(f)(np.ones(2))


# ---------------------------------------------------------------- hooks on saved arrays

def network(ws, x):
    for w in ws:
        x = mt.tanh(x @ w) * mt.max(x, axis=1, keepdims=True)
    return mt.softmax_cross_entropy(x, np.array([0, 2, 1, 0])).sum()


def gradients(**backward):
    r = np.random.default_rng(0)
    ws = [mt.tensor(r.standard_normal((5, 5)), requires_grad=True) for _ in range(3)]
    network(ws, mt.tensor(r.standard_normal((4, 5)))).backward(**backward)
    return [w.grad.numpy() for w in ws]


def test_packing_to_disk_and_back_gives_the_same_bits(tmp_path):
    written, read = [], []

    def pack(array):
        path = tmp_path / f"{len(written)}.npy"
        np.save(path, array)
        written.append(path)
        return path

    def unpack(path):
        read.append(path)
        return np.load(path)
    with mt.saved_tensors_hooks(pack, unpack):
        packed = gradients()
    for a, b in zip(packed, gradients(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert len(written) > 10 and set(read) <= set(written) and len(set(read)) > 10


def test_packed_arrays_serve_higher_orders_and_retain_graph():
    x = leaf(0.3, 0.7)
    with mt.saved_tensors_hooks(lambda a: a.tolist(), np.array):
        y = (mt.sin(x) * x * x).sum()
        y.backward(retain_graph=True)
        first = x.grad.numpy().copy()
        x.grad = None
        y.backward(create_graph=True)
    np.testing.assert_array_equal(x.grad.numpy(), first)
    g, x.grad = x.grad, None
    g.sum().backward()
    v = x.numpy()
    np.testing.assert_allclose(x.grad.numpy(), -np.sin(v) * v * v + 4 * np.cos(v) * v + 2 * np.sin(v))


@pytest.mark.parametrize("place", range(3), ids=["x", "weight", "bias"])
def test_packed_arrays_serve_derivatives_of_a_pullback(place):
    """What a first derivative doesn't read, a second one does, though the op itself is on the tape of one level."""
    draw = np.random.default_rng(0).standard_normal
    values, t = [draw((6, 5)), draw((7, 5)), draw(7)], draw((6, 7))

    def slope(t):
        f = lambda value: mt.linear(*values[:place], value, *values[place + 1:])    # noqa: E731
        return mt.sum(mt.vjp(f, values[place])[1](t)[0] ** 2.0)

    def gradients():
        leaf = mt.tensor(t, requires_grad=True)
        slope(leaf).backward()
        return mt.grad(slope)(t), leaf.grad.numpy()
    with mt.saved_tensors_hooks(lambda a: [a], lambda kept: kept[0]):
        packed = gradients()
    for got, wanted in zip(packed, gradients(), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_quantising_changes_the_gradient_as_it_should():
    x = leaf(0.26, 0.74)
    with mt.saved_tensors_hooks(lambda a: np.round(a * 10).astype(np.int8), lambda q: q / 10.0):
        y = (x * x).sum()
    y.backward()
    np.testing.assert_allclose(x.grad.numpy(), 2 * np.array([0.3, 0.7]))


def test_only_what_is_recorded_inside_is_packed_and_packing_keeps_no_array():
    x, kept = leaf(0.3, 0.7), []
    a = mt.exp(x)
    with mt.saved_tensors_hooks(lambda array: kept.append(array.shape), lambda nothing: np.zeros(2)):
        b = mt.exp(x)
        array = weakref.ref(b.data)
        c = b.sum()
        del b
        with mt.no_grad():
            mt.exp(x)
    assert kept == [(2,)] and array() is None
    c.backward()
    a.sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), np.exp(x.numpy()))


def test_an_error_in_unpack_comes_through():
    x = leaf(0.3)
    with mt.saved_tensors_hooks(lambda a: None, lambda nothing: 1 / 0):
        y = mt.exp(x).sum()
    with pytest.raises(ZeroDivisionError):
        y.backward()
    mt.exp(x).sum().backward()


def test_a_write_to_what_was_packed_is_an_alarm_only_if_the_array_itself_was_kept():
    for pack, alarm in ((lambda a: a, True), (np.copy, False)):
        x, u = leaf(1.0, 2.0), mt.tensor(np.ones(2))
        with mt.saved_tensors_hooks(pack, lambda a: a):
            y = (x * u).sum()
        u[0] = 5.0
        if alarm:
            with pytest.raises(RuntimeError, match="overwritten"):
                y.backward()
        else:
            y.backward()
            np.testing.assert_array_equal(x.grad.numpy(), [1.0, 1.0])



# ---------------------------------------------------------------- errors in the middle

def broken(error_in):
    """An op whose rule raises when it is asked for a residual, or when its LinearOp is applied."""
    def residual(x):
        if error_in == "residual":
            raise KeyError("in a rule")
        return 1.0

    def linear(t, r):
        raise KeyError("in a rule")
    op = LinearOp("broken", linear, linear, listed=False)
    return Primitive("broken", lambda x: x * 1.0, x=(op, residual), listed=False)


@pytest.mark.parametrize("error_in", ["residual", "linear"])
def test_an_error_in_a_rule_leaves_level_modes_and_engine_usable(error_in):
    primitive = broken(error_in)
    f = lambda x: mt.sum(mt.sin(bind(primitive, (x * 2.0,))))   # noqa: E731
    x, t = np.ones(2), leaf(1.0, 1.0)
    gc.collect()
    gc.disable()
    try:
        for run in (lambda: f(t).backward(), lambda: mt.grad(f)(x), lambda: mt.jvp(f, (x,), (x,)),
                    lambda: mt.linearize(f, x)[1](x), lambda: mt.hvp(f, x, x), lambda: mt.grad(mt.checkpoint(f))(x),
                    lambda: mt.checkpoint(f)(t).backward(create_graph=True), lambda: mt.jacfwd(mt.grad(f))(x)):
            with mt.detect_anomaly():
                try:
                    run()
                except KeyError:
                    pass
                else:
                    pytest.fail("the rule's error was swallowed")
            assert (state.level, state.off, state.anomaly, state.callbacks) == (0, -1, False, None)
            assert t.grad is None
        assert gc.collect() == 0    # what the failed passes had built is gone
    finally:
        gc.enable()
    np.testing.assert_allclose(mt.hessian(lambda x: mt.sum(x * x * x))(x), 6 * np.eye(2))
    (t * t).sum().backward()
    np.testing.assert_array_equal(t.grad.numpy(), [2.0, 2.0])


def test_an_error_in_the_function_leaves_the_level():
    def f(x):
        mt.sin(x)
        raise KeyError
    for transform in (mt.grad, mt.jacfwd, mt.jacrev, lambda f: lambda x: mt.linearize(f, x),
                      lambda f: lambda x: mt.linear_transpose(f, x), lambda f: lambda x: mt.grad(mt.checkpoint(f))(x)):
        with pytest.raises((KeyError, TypeError)):
            mt.grad(lambda x, transform=transform: mt.sum(transform(f)(x)))(np.ones(2))
        assert state.level == 0


def test_what_hooks_bring_back_has_a_history_of_its_own():
    """unpack() may be handed memory that somebody has written, and freed; the same array again stays watched."""
    x = mt.tensor(np.random.default_rng(0).standard_normal((64, 64)), requires_grad=True)
    memory = np.empty((64, 64))

    def unpack(kept):
        memory[...] = kept
        return memory
    with mt.saved_tensors_hooks(np.copy, unpack):
        y = mt.sum(x @ x)
    mt.from_numpy(memory)[3:] = 1.0
    y.backward()
    np.testing.assert_allclose(x.grad.numpy(), x.numpy().sum(1) + x.numpy().sum(0)[:, None])
    packed = []
    with mt.saved_tensors_hooks(lambda a: packed.append(a) or a, lambda a: a):
        z = x * 1.0
        y = mt.sum(z @ z)
    assert len({id(a) for a in packed}) == len(packed)      # z is kept twice, and packed once
    with mt.no_grad():
        z[0] = 0.0
    with pytest.raises(RuntimeError, match="overwritten"):
        y.backward()


def test_autocast_of_a_leaf_that_is_a_number():
    s = mt.tensor(np.float32([1, 2])).sum().detach().requires_grad_()
    with mt.autocast():
        y = mt.sum(mt.einsum(",i->i", s, mt.tensor(np.float32([1, 2]))))
    y.backward()
    assert s.grad.item() == 3.0
