"""Compiled functions and everything that takes functions: derivatives of derivatives, transforms, methods, copies,
threads."""

import copy
import pickle
import threading

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import ledger, nn

from .compare import EMITS, arrays

EMIT = pytest.mark.parametrize("emit", EMITS)
RANDOM = np.random.default_rng(0)
X, W = RANDOM.standard_normal((5, 4)), RANDOM.standard_normal((4, 3))


def f(x, w):
    return mt.tanh(mt.layer_norm(x @ w, 3)) * mt.exp(mt.sum(x, 1, keepdims=True)) + mt.softmax(x @ w)


def close(found, expected, tolerance=1e-11):
    found, expected = arrays(found), arrays(expected)
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@EMIT
def test_on_the_tape_it_is_differentiated_once(emit):
    """A derivative of its derivative is refused, not made up; the compiled derivative has one."""
    compiled = mt.compile(f, emit=emit)
    leaf = mt.tensor(X, requires_grad=True)
    with pytest.raises(RuntimeError, match="differentiated once only"):
        compiled(leaf, mt.tensor(W)).sum().backward(create_graph=True)
    number = lambda x: mt.sum(f(x, W) ** 2)     # noqa: E731
    g = mt.compile(mt.grad(number), emit=emit)
    (g(leaf) * np.cos(X)).sum().backward()
    close(leaf.grad, mt.hvp(number, X, np.cos(X)))


@EMIT
def test_transforms_of_a_compiled_function(emit):
    """Inside of a transform it is the function itself."""
    compiled, v = mt.compile(f, emit=emit), (np.cos(X), np.sin(W))
    number, plain = lambda x, w: mt.sum(compiled(x, w) ** 2), lambda x, w: mt.sum(f(x, w) ** 2)
    close(mt.grad(number, (0, 1))(X, W), mt.grad(plain, (0, 1))(X, W))
    close(mt.value_and_grad(number)(X, W), mt.value_and_grad(plain)(X, W))
    close(mt.jvp(compiled, (X, W), v), mt.jvp(f, (X, W), v))
    u = np.ones((5, 3))
    close(mt.vjp(compiled, X, W)[1](u), mt.vjp(f, X, W)[1](u))
    close(mt.jvp(mt.grad(number), (X, W), v), mt.jvp(mt.grad(plain), (X, W), v))
    close(mt.jacrev(compiled)(X, W), mt.jacrev(f)(X, W))
    assert not compiled.variants
    compiled(mt.tensor(X), mt.tensor(W))
    close(mt.jvp(compiled, (X, W), v), mt.jvp(f, (X, W), v))


@EMIT
def test_compiled_transforms(emit):
    number = lambda x, w: mt.sum(f(x, w) ** 2)      # noqa: E731
    for transformed in (mt.grad(number, (0, 1)), mt.value_and_grad(number), mt.jacrev(lambda x, w: mt.sum(f(x, w), 0)),
                        lambda x, w: mt.jvp(number, (x, w), (x, w)), lambda x, w: mt.vjp(f, x, w)[1](mt.exp(x[:, :3])),
                        lambda x, w: mt.jvp(mt.grad(number), (x, w), (x, w))):
        compiled = mt.compile(transformed, emit=emit)
        for args in ((X, W), (mt.tensor(X), mt.tensor(W)), (X + 1, W)):
            close(compiled(*args), transformed(*args), 1e-10)
        assert not compiled.breaks and compiled.variants


@EMIT
def test_some_outputs_get_no_cotangent(emit):
    def g(x, w):
        h = x @ w
        return {"a": mt.exp(h), "b": [mt.sum(x), (mt.tanh(w), 3, "text", None)], "c": np.ones(2), "d": mt.greater(h, 0),
                "e": mt.stop_gradient(h), "f": h.shape}
    compiled = mt.compile(g, emit=emit)
    picks = {"a": lambda o: o["a"], "b": lambda o: o["b"][0], "c": lambda o: o["b"][1][0],
             "ab": lambda o: o["a"] * o["b"][0]}
    for pick in picks.values():
        results = []
        for function in (compiled, g):
            leaves = [mt.tensor(a, requires_grad=True) for a in (X, W)]
            out = function(*leaves)
            pick(out).sum().backward()
            results.append([0 * leaf.data if leaf.grad is None else leaf.grad for leaf in leaves])
            assert list(out) == list("abcdef") and type(out["b"][1]) is tuple and out["b"][1][1:] == (3, "text", None)
            assert type(out["c"]) is np.ndarray and out["d"].dtype == bool and out["f"] == (5, 3)
            assert not out["d"].requires_grad and not out["e"].requires_grad and out["a"].requires_grad
        close(*results)


def test_backward_twice_and_gradients_that_add_up():
    results = []
    for function in (mt.compile(f, emit="numpy"), f):
        leaves = [mt.tensor(a, requires_grad=True) for a in (X, W)]
        y = function(*leaves)
        y.sum().backward(retain_graph=True)
        y.sum().backward()
        function(*leaves).sum().backward()
        results.append([leaf.grad for leaf in leaves])
        with pytest.raises(RuntimeError):
            y.sum().backward()
    close(*results)


def test_backward_after_a_write_raises():
    """As eager does: what backward needs was overwritten."""
    w = mt.tensor(W, requires_grad=True)
    for function in (lambda x: mt.exp(x @ w), mt.compile(lambda x: mt.exp(x @ w), emit="numpy")):
        y = function(mt.tensor(X, requires_grad=True))
        with mt.no_grad():
            w[0] = 1.0
        with pytest.raises(RuntimeError, match="overwritten"):
            y.sum().backward()


class Method:
    def __init__(self, factor):
        self.factor, self.runs = factor, 0

    @mt.compile
    def scaled(self, x, by=1.0):
        """Scaled."""
        return mt.exp(x) * self.factor * by


def test_as_a_decorator_of_methods():
    one, two, x = Method(2.0), Method(3.0), mt.tensor(X)
    for thing in (one, two, one):
        close(thing.scaled(x), np.exp(X) * thing.factor)
        close(thing.scaled(x, by=2.0), np.exp(X) * thing.factor * 2)
    one.factor = 5.0
    close(one.scaled(x), np.exp(X) * 5.0)
    assert one.scaled is one.scaled and one.scaled is not two.scaled
    assert Method.scaled.__name__ == "scaled" and Method.scaled.__doc__ == "Scaled."


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3, dtype=np.float64)

    @mt.compile
    def forward(self, x):
        return mt.tanh(self.linear(x))


def test_forward_of_a_module_as_a_decorated_method():
    mt.manual_seed(0)
    net, other = Net(), Net()
    for model in (net, other, net):
        close(model(mt.tensor(X)), np.tanh(X @ model.linear.weight.numpy().T + model.linear.bias.numpy()))
    assert list(net.state_dict()) == ["linear.weight", "linear.bias"]


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("called", [False, True])
def test_copies_of_compiled_modules(again, called):
    mt.manual_seed(0)
    model = mt.compile(nn.Sequential(nn.Linear(4, 3, dtype=np.float64), nn.Tanh()), emit="numpy")
    if called:
        model(mt.tensor(X)).sum().backward()
    other = again(model)
    close(other(mt.tensor(X)), model(mt.tensor(X)))
    other.zero_grad()
    model.zero_grad()
    with mt.no_grad():
        next(other.parameters())[...] = 0.0
    assert not np.allclose(other(mt.tensor(X)).numpy(), model(mt.tensor(X)).numpy())
    other(mt.tensor(X)).sum().backward()
    assert all(p.grad is None for p in model.parameters()) and all(p.grad is not None for p in other.parameters())
    assert [*other.state_dict()] == [*model.state_dict()] and not other.breaks


def test_compiled_functions_are_pickled():
    again = pickle.loads(pickle.dumps(mt.compile(f, emit="numpy")))
    close(again(mt.tensor(X), mt.tensor(W)), f(mt.tensor(X), mt.tensor(W)))
    assert again.emit == "numpy" and not again.breaks


def test_compiled_inside_of_compiled():
    inner = mt.compile(lambda x: mt.exp(x) * 2.0, emit="numpy")
    outer = lambda x: inner(x) + inner(mt.sin(x))      # noqa: E731
    compiled = mt.compile(outer, emit="numpy")
    results = []
    for function in (compiled, compiled, outer):
        x = mt.tensor(X, requires_grad=True)
        y = function(x)
        y.sum().backward()
        results.append([y, x.grad])
    close(results[0], results[2])
    close(results[1], results[2])
    assert not compiled.breaks


@EMIT
def test_checkpoints(emit):
    """A checkpoint inside of a compiled function, a compiled function inside of a checkpoint, which may stand in the
    place of a compiled module's forward; dropout's masks too."""
    part = lambda x: mt.tanh(mt.dropout(mt.exp(x), 0.5)) * x    # noqa: E731

    class Part(mt.nn.Module):
        def forward(self, x):
            return part(part(x))
    module = mt.compile(Part(), emit=emit)
    module.forward = mt.checkpoint(module.forward)
    programs = {"plain": lambda x: part(part(x)), "inside": mt.compile(lambda x: mt.checkpoint(part)(
        mt.checkpoint(part)(x)), emit=emit), "around": mt.checkpoint(mt.compile(lambda x: part(part(x)), emit=emit)),
                "module": module}
    results = {}
    for name, function in programs.items():
        for call in range(2):
            mt.manual_seed(3 + call)
            x = mt.tensor(X, requires_grad=True)
            y = function(x)
            y.sum().backward()
            results[name, call] = [y, x.grad, mt.randn(2)]      # the stream stands where it stands without
    for call in range(2):
        close(results["inside", call], results["plain", call])
        close(results["around", call], results["plain", call])
        close(results["module", call], results["plain", call])


@EMIT
@pytest.mark.parametrize("inner", [lambda g: g, mt.checkpoint], ids=["once", "twice"])
def test_a_checkpoint_s_results_hang_on_their_own_arguments(emit, inner):
    """An argument that no gradient reaches has none, as uncompiled, though another result hangs on it."""
    g = inner(lambda a, b, c: [mt.tanh(a) * 2, a * b, c])
    compiled = mt.compile(mt.checkpoint(lambda a, b, c: g(a, b, mt.exp(c))), emit=emit)
    for k, reached in enumerate(("a", "ab", "c")):
        leaves = [mt.tensor(X, requires_grad=True) for _ in "abc"]
        compiled(*leaves)[k].sum().backward()
        assert "".join(name for name, x in zip("abc", leaves, strict=True) if x.grad is not None) == reached
    assert not compiled.breaks


@EMIT
def test_threads(emit):
    """Two threads, one compiled function, each with arguments of its own."""
    compiled, wrong = mt.compile(f, emit=emit), []
    start = threading.Barrier(4)

    def work(number):
        random = np.random.default_rng(number)
        start.wait()
        for i in range(15):
            x = random.standard_normal((2 + (number + i) % 4, 4))
            leaf = mt.tensor(x, requires_grad=True)
            try:
                y = compiled(leaf, mt.tensor(W))
                y.sum().backward()
                ref = mt.tensor(x, requires_grad=True)
                z = f(ref, mt.tensor(W))
                z.sum().backward()
                if not np.allclose(y.numpy(), z.numpy()) or not np.allclose(leaf.grad.numpy(), ref.grad.numpy()):
                    wrong.append((number, i))
            except Exception as error:      # a thread's error would be nobody's
                wrong.append(repr(error))
    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not compiled.breaks and not any(t.is_alive() for t in threads)


@pytest.mark.filterwarnings("ignore:.*captured once more")
def test_threads_and_buffers():
    """A module's buffers are what they are for every thread, while one of them is making a graph."""
    mt.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3, dtype=np.float64), nn.BatchNorm(3, dtype=np.float64), nn.Tanh()).eval()
    compiled, wrong, start = mt.compile(model, emit="numpy"), [], threading.Barrier(3)
    expected = {n: model(mt.tensor(np.ones((n, 4)))).numpy() for n in range(1, 40)}

    def work(number):
        start.wait()
        for n in range(1, 40):
            try:
                function = model if number == 2 else compiled
                if not np.allclose(function(mt.tensor(np.ones((n, 4)))).numpy(), expected[n]):
                    wrong.append((number, n))
            except Exception as error:
                wrong.append((number, n, repr(error)))
    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong, wrong[:3]
    assert not compiled.breaks and not any(t.is_alive() for t in threads)


def test_ledgers_count_nothing_while_a_graph_is_made():
    """What capture does is no work of the program."""
    compiled = mt.compile(lambda x: mt.softmax(mt.exp(x)), emit="c")
    with ledger.record(memory=True) as first:
        compiled(mt.tensor(X, requires_grad=True))
    with ledger.record(memory=True) as second:
        compiled(mt.tensor(X, requires_grad=True))
    assert first.launches == second.launches and first.peak == second.peak
