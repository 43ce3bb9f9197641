"""The tape: accumulation, hooks, memory, staleness, errors."""

import copy
import doctest
import gc
import threading
import time
import weakref

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist.autodiff import reverse
from minitorch_dist.autodiff.ops.shape import Bundle


def leaf(*shape, dtype=np.float64):
    return mt.tensor(np.random.default_rng(0).standard_normal(shape), dtype=dtype, requires_grad=True)


def test_the_scalar_version_in_the_docstring_runs():
    assert doctest.testmod(reverse).attempted > 0
    assert doctest.testmod(reverse).failed == 0


# ---------------------------------------------------------------- gradients

def test_gradients_accumulate_over_uses_and_over_passes():
    x = leaf(3)
    (x * x + x * 3.0).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), 2 * x.numpy() + 3)
    (x * 5.0).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), 2 * x.numpy() + 8)


@pytest.mark.parametrize("shape", [(3,), ()])
def test_gradients_on_the_tape_share_no_memory(shape):
    """y = p + q hands its cotangent on to both; what is added to one of them later is in no other, nor in a retained
    gradient, nor in the cotangent."""
    p, q = (mt.tensor(np.full(shape, v), requires_grad=True) for v in (2.0, 3.0))
    y, ct = (p + q).retain_grad(), mt.tensor(np.ones(shape))
    y.backward(ct, create_graph=True)
    (p * 5.0).sum().backward()
    for tensor, expected in ((p.grad, 6.0), (q.grad, 1.0), (y.grad, 1.0), (ct, 1.0)):
        np.testing.assert_array_equal(tensor.numpy(), np.full(shape, expected))
    p.grad = None
    (p * p * q).sum().backward(create_graph=True)
    g = p.grad
    (g * g).sum().backward()        # (2pq)²: 8pq² and 8p²q
    np.testing.assert_array_equal(p.grad.numpy(), np.full(shape, 12.0 + 144))
    np.testing.assert_array_equal(q.grad.numpy(), np.full(shape, 1.0 + 4 + 96))


ONE_FOR_ONE = {
    "sum of ones": lambda x: mt.sum(x, 1), "sum, kept": lambda x: mt.sum(x, 1, keepdims=True),
    "sum over none": lambda x: mt.sum(x, ()), "mean": lambda x: mt.mean(x, 1), "max": lambda x: mt.max(x, 1),
    "einsum": lambda x: mt.einsum("ij->ij", x), "einsum, turned": lambda x: mt.einsum("ij->ji", x),
    "fold": lambda x: mt.ops.windows.fold(x, (3,), (1,), (1,), (1,)), "reshape": lambda x: mt.reshape(x, 3),
    "windows": lambda x: mt.ops.windows.windows(mt.reshape(x, 3), (1,), (1,), (1,)), "transpose": lambda x: x.T,
    "getitem": lambda x: x[...], "broadcast_to": lambda x: mt.broadcast_to(x, (1, 3, 1)), "add": lambda x: x + 0.0,
    "broadcast_to, as it is": lambda x: mt.broadcast_to(x, (3, 1)), "clip to nothing": lambda x: mt.clip(x),
    "concatenate": lambda x: mt.concatenate([x], 0), "split": lambda x: mt.split(x, 1)[0],
    "cumsum": lambda x: mt.cumsum(x, 1), "prod": lambda x: mt.prod(x, 1),
    "layer_norm": lambda x: mt.layer_norm(ROWS, (3, 1), ROWS, x), "max_pool": lambda x: mt.max_pool1d(x[None], 1),
    "checkpoint": lambda x: mt.checkpoint(lambda x: x + 0.0)(x)}
ROWS = np.array([[1.0], [2.0], [4.0]])


@pytest.mark.parametrize("name", ONE_FOR_ONE)
def test_a_gradient_is_no_view_of_its_cotangent(name):
    """Where an op hands each element on as it is, both leaves get the same numbers, and the next ones apart."""
    p, q = (mt.tensor(ROWS, requires_grad=True) for _ in range(2))
    y = ONE_FOR_ONE[name](p) + ONE_FOR_ONE[name](q)
    ct = mt.tensor(np.ones(y.shape))
    y.backward(ct)
    assert not any(np.shares_memory(a.data, b.data) for a, b in ((p.grad, q.grad), (p.grad, ct), (q.grad, ct)))
    first = q.grad.numpy().copy()
    (p * 5.0).sum().backward()
    np.testing.assert_array_equal(q.grad.numpy(), first)
    np.testing.assert_array_equal(p.grad.numpy(), first + 5.0)


@pytest.mark.parametrize("op", [lambda x: mt.broadcast_to(x, (3,)), lambda x: mt.broadcast_to(x, (2, 3)), mt.clip],
                         ids=["broadcast_to its shape", "broadcast_to", "clip without bounds"])
def test_what_changes_nothing_copies_all_the_same(op):
    """It was x, which a write has changed, and a gradient reached out of no_grad."""
    x = leaf(3)
    before = x.numpy().copy()
    with mt.no_grad():
        y = op(x)
        y[...] = 0.0
    assert y.node is None
    np.testing.assert_array_equal(x.numpy(), before)


def test_gradients_of_two_leaves_share_no_memory():
    p, q = leaf(3), leaf(3)
    (p + q).sum().backward()
    assert not np.shares_memory(p.grad.numpy(), q.grad.numpy())
    ct = np.ones(3)
    p.grad = None
    (p + 0.0).backward(mt.from_numpy(ct))
    assert not np.shares_memory(p.grad.numpy(), ct)


def test_a_contribution_that_is_none_makes_no_gradient_ones_own():
    """The last op to speak has nothing for w; what had come before is the caller's own array."""
    @mt.custom_vjp
    def scaled(x, w):
        return x * w
    scaled.defvjp(lambda x, w: (x * w, w), lambda w, ct: (ct * w, None))
    a, v, w = (mt.tensor(np.ones(3), requires_grad=True) for _ in range(3))
    g = mt.tensor(np.ones(3))
    for _ in range(2):
        ((v + scaled(a, v)) + (w + scaled(a, w))).backward(g)
    assert not any(np.shares_memory(x, y) for x, y in ((v.grad.data, w.grad.data), (w.grad.data, g.data)))
    assert g.numpy().tolist() == [1] * 3 and v.grad.numpy().tolist() == w.grad.numpy().tolist() == [2] * 3



def test_a_leaf_that_is_frozen_before_backward_gets_its_gradient_still():
    p = leaf(3)
    y = (p * 2.0).sum()
    p.requires_grad_(False)
    y.backward()
    assert p.grad.numpy().tolist() == [2.0] * 3


def test_a_gradient_of_a_0d_leaf_can_be_accumulated():
    x = mt.tensor(3.0, requires_grad=True)
    (x * x).backward()
    (x * x).backward()
    assert x.grad.item() == 12.0


def test_retain_graph_and_second_backward():
    x = leaf(3)
    y = (mt.tanh(x) * x).sum()
    y.backward(retain_graph=True)
    once = x.grad.numpy().copy()
    y.backward()
    np.testing.assert_allclose(x.grad.numpy(), 2 * once)     # interior gradients are not added up again
    with pytest.raises(RuntimeError, match="backward through 'sum' a second time.*retain_graph=True"):
        y.backward()


@pytest.mark.parametrize("gradient, message", [
    (np.ones((2, 3)), r"shape \(2, 3\).*shape \(3, 2\)"),
    (np.ones((3, 2), np.float32), "dtype float32.*dtype float64"),
    (1.0, "a float"),
])
def test_a_cotangent_that_does_not_fit_raises(gradient, message):
    with pytest.raises(ValueError, match=message):
        (leaf(3, 2) * 2.0).backward(gradient)


def test_backward_from_more_than_one_element_needs_a_cotangent():
    with pytest.raises(RuntimeError, match=r"shape \(3,\).*pass gradient="):
        (leaf(3) * 2.0).backward()


def test_backward_without_a_graph_raises():
    with pytest.raises(RuntimeError, match="no gradient reaches"):
        mt.tensor([1.0]).backward()


def test_integers_get_no_gradient():
    with pytest.raises(TypeError, match="int64 tensor can't get a gradient"):
        mt.tensor([1, 2], requires_grad=True)
    x = leaf(3)
    assert not x.astype(np.int32).requires_grad
    assert not (x > 0).requires_grad


def test_no_grad_records_nothing_but_transforms_inside_do():
    x = leaf(3)
    with mt.no_grad():
        assert not (x * 2.0).requires_grad
        assert not mt.is_grad_enabled()
        g = mt.grad(lambda z: mt.sum(z * x))(np.ones(3))
        assert not getattr(g, "requires_grad", False)
        np.testing.assert_allclose(g.numpy() if isinstance(g, mt.Tensor) else g, x.numpy())
    assert mt.is_grad_enabled() and (x * 2.0).requires_grad


def test_no_grad_inside_a_transform_cuts_there():
    def f(z):
        with mt.no_grad():
            constant = mt.sum(z * z)
        return mt.sum(z) * constant
    z = np.array([1.0, 2.0])
    np.testing.assert_allclose(mt.grad(f)(z), [5.0, 5.0])


def test_grad_mode_is_per_thread():
    seen = []
    with mt.no_grad():
        t = threading.Thread(target=lambda: seen.append((leaf(2) * 2.0).requires_grad))
        t.start()
        t.join()
    assert seen == [True]


# ---------------------------------------------------------------- hooks

def test_a_hook_runs_once_when_the_last_contribution_has_arrived():
    w, x = leaf(3), leaf(3)
    seen = []
    w.register_post_accumulate_grad_hook(lambda t: seen.append(t.grad.numpy().copy()))
    (w * 2.0 + mt.tanh(x * w) + w * 3.0).sum().backward()
    assert len(seen) == 1
    np.testing.assert_array_equal(seen[0], w.grad.numpy())


def test_hooks_run_while_backward_is_still_under_way_last_layer_first():
    ws = [leaf(2, 2) for _ in range(4)]
    order = []
    for i, w in enumerate(ws):
        w.register_post_accumulate_grad_hook(lambda t, i=i: order.append(
            (i, [k for k, other in enumerate(ws) if other.grad is not None])))
    h = np.ones((1, 2))
    for w in ws:
        h = mt.tanh(h @ w)
    h.sum().backward()
    assert order == [(3, [3]), (2, [2, 3]), (1, [1, 2, 3]), (0, [0, 1, 2, 3])]


def test_a_removed_hook_is_silent_and_callbacks_run_at_the_end():
    x = leaf(2)
    events = []
    handle = x.register_post_accumulate_grad_hook(lambda t: events.append("hook"))
    x.register_post_accumulate_grad_hook(lambda t: mt.at_end_of_backward(end))

    def end():
        events.append("end")
    (x * 1.0).sum().backward()
    handle.remove()
    (x * 1.0).sum().backward()
    assert events == ["hook", "end", "end"]
    with pytest.raises(RuntimeError, match="outside of a backward"):
        mt.at_end_of_backward(end)


# ---------------------------------------------------------------- size and memory

def test_10000_ops_deep_and_wide_neither_recurse_nor_slow_down():
    def seconds(n):
        x = leaf(2, 2)
        begin = time.process_time()      # whatever else the machine does
        y = x
        for _ in range(n):
            y = mt.tanh(y)
        y.sum().backward()
        assert np.isfinite(x.grad.numpy()).all()
        return (time.process_time() - begin) / n

    seconds(100)
    assert min(seconds(10_000) for _ in range(3)) < 5 * min(seconds(500) for _ in range(5))
    x = leaf(2)
    parts = [x * float(i) for i in range(10_000)]
    total = parts[0]
    for p in parts[1:]:
        total = total + p
    total.sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), [49_995_000.0] * 2)


@pytest.fixture
def no_gc():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_the_graph_is_freed_by_reference_counting(no_gc):
    x = leaf(3, 3)
    hook_calls = []
    x.register_post_accumulate_grad_hook(lambda t: hook_calls.append(1))

    def build(n):
        y = x
        for _ in range(n):
            y = mt.exp(-y @ x) * 0.5
        return y.sum()

    for use in (lambda y: None, lambda y: y.backward(), lambda y: y.backward(create_graph=True),
                lambda y: mt.grad(lambda z: mt.sum(mt.tanh(z) * z))(x)):
        y = build(50)
        node = weakref.ref(y.node)
        use(y)
        x.grad = None
        del y
        assert node() is None, use
    assert gc.collect() == 0


def test_an_exception_in_backward_frees_and_leaves_the_engine_usable(no_gc):
    x = leaf(3)
    handle = x.register_post_accumulate_grad_hook(lambda t: 1 / 0)
    y = (x * x).sum()
    node = weakref.ref(y.node)
    try:
        y.backward()
    except ZeroDivisionError as e:
        e.__traceback__ = None
    else:
        pytest.fail("the hook's error was swallowed")
    del y
    assert node() is None
    handle.remove()
    x.grad = None
    (x * x).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), 2 * x.numpy())


def test_backward_frees_what_it_used():
    x = leaf(100)
    y = mt.exp(x)
    middle = weakref.ref(y.data)
    z = (y * 2.0).sum()
    del y
    z.backward()
    assert middle() is None     # although z is still alive


# ---------------------------------------------------------------- values

def test_tensor_copies_and_from_numpy_aliases_and_numpy_is_read_only():
    a = np.zeros(3)
    copied, shared = mt.tensor(a), mt.from_numpy(a)
    a[0] = 1
    assert copied.numpy()[0] == 0 and shared.numpy()[0] == 1
    with pytest.raises(ValueError, match="read-only"):
        copied.numpy()[0] = 1


@pytest.mark.parametrize("call, error, message", [
    (lambda: mt.tensor([1.0]).register_hook(print), RuntimeError, "register_hook: no gradient reaches"),
    (lambda: mt.tensor([1.0]).register_post_accumulate_grad_hook(print), RuntimeError, "only a leaf that requires"),
    (lambda: (leaf(2) * 2.0).register_post_accumulate_grad_hook(print), RuntimeError, "only a leaf that requires"),
    (lambda: copy.deepcopy(leaf(2) * 2.0), RuntimeError, "only leaf tensors .* detach"),
    (lambda: mt.from_numpy([1.0]), TypeError, "from_numpy takes a NumPy array, got list"),
    (lambda: mt.Tensor(1.0).__setitem__(..., 2.0), TypeError, "float can't be written in place"),
    (lambda: mt.tensor([1.0, 2.0])[0].__setitem__(..., 2.0), TypeError, "float32 can't be written in place"),
    (lambda: len(mt.tensor(1.0)), TypeError, r"len\(\) of a 0-d tensor"),
])
def test_what_a_tensor_can_not_do_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_dtypes_of_new_tensors():
    assert mt.tensor(1.5).dtype == np.float32 and mt.tensor([1, 2]).dtype == np.int64
    assert mt.tensor(np.float64(1.5)).dtype == np.float64
    with pytest.raises(TypeError, match="complex128"):
        mt.tensor([1j])


def test_python_numbers_are_weak_and_arrays_are_not():
    x = leaf(2, dtype=np.float32)
    assert (x * 2.5).dtype == np.float32 and (1 / x).dtype == np.float32
    y = x * np.ones(2)
    assert y.dtype == np.float64
    y.sum().backward()
    assert x.grad.dtype == np.float32       # cast back in the one place for it


def test_numpy_cannot_swallow_a_tensor():
    with pytest.raises(TypeError):
        np.exp(leaf(2))
    with pytest.raises(TypeError, match="lose its derivative"):
        np.asarray(leaf(2))
    assert isinstance(np.ones(2) * leaf(2), mt.Tensor)


def test_unknown_operands_are_named():
    with pytest.raises(TypeError, match="mul: can't take a str"):
        leaf(2) * "two"


def test_grad_must_fit():
    with pytest.raises(ValueError, match=r"shape \(2,\).*shape \(3,\)"):
        leaf(3).grad = np.ones(2)


def test_requires_grad_can_be_set():
    w = leaf(3)
    w.requires_grad = False
    assert not w.requires_grad and not (w * 2.0).requires_grad
    w.requires_grad = True
    (w * 2.0).sum().backward()
    assert w.grad.tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(RuntimeError, match="detach"):
        (w * 2.0).requires_grad = False


def test_a_number_is_formatted_as_one():
    loss = leaf(3).sum() * 0.0 + 2.5
    assert f"{loss:.3f}" == "2.500" and f"{loss}" == repr(loss)
    with pytest.raises(ValueError, match="size 1"):
        f"{leaf(3):.3f}"    # noqa: B018


@pytest.mark.parametrize("again", [False, True])
def test_each_of_many_outputs_costs_a_step_and_no_more(again, monkeypatch):
    """Their cotangents are put together one by one, not all anew for each; in any order, some used twice or never."""
    added, add = [], Bundle.__add__
    monkeypatch.setattr(Bundle, "__add__", lambda self, other: (added.append(len(other.arrived)), add(self, other))[1])
    x, weights = mt.tensor(np.ones((100, 3)), requires_grad=True), np.random.default_rng(0).standard_normal((100, 3))
    parts = mt.split(x, 100, 0)
    used = [*range(99, 20, -1), 40, *range(10)]
    sum((parts[i] * parts[i] * weights[i]).sum() for i in used).backward(create_graph=again)
    wanted = np.zeros((100, 3))
    for i in used:
        wanted[i] += 2 * weights[i]
    np.testing.assert_allclose(x.grad.numpy(), wanted, rtol=1e-15)
    assert sum(added) <= 2 * len(used)


def test_each_of_many_arrays_that_are_joined_asks_for_its_piece_alone(monkeypatch):
    """The joined cotangent isn't cut into all pieces for each."""
    parts = [mt.tensor(np.ones((2, size)), requires_grad=True) for size in (3, 0, 1, 4) * 25]
    joined, weights = mt.concatenate(parts, 1), np.random.default_rng(0).standard_normal((2, 200))
    monkeypatch.setattr(np, "split", None)
    joined.backward(weights)
    np.testing.assert_array_equal(np.concatenate([part.grad.numpy() for part in parts], 1), weights)
