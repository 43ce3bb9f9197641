"""checkpoint(f, save=ops): the same bits, without these ops' second run."""

import gc
import weakref
from collections import Counter

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import backend, comm, ledger, nn
from minitorch_dist.autodiff.primitive import OPS, state
from minitorch_dist.parallel import DistributedDataParallel, fully_shard

PRODUCTS = ("linear", "attention")
X = np.array([0.3, 0.7, 1.1])


@pytest.fixture
def forwards(monkeypatch):
    """How often each of these ops' forward has run."""
    counts = Counter()
    for name in ("linear", "attention", "layer_norm"):
        def counted(*args, name=name, forward=OPS[name].forward):
            counts[name] += 1
            return forward(*args)
        monkeypatch.setattr(OPS[name], "forward", counted)
    return counts


def gpt_step(save, wrap=lambda model: model, autocast=False):
    """(loss and gradients of a GPT, its blocks checkpointed unless save is None; bytes kept between the passes)."""
    mt.manual_seed(1)
    gpt = nn.GPT(11, 7, layers=2, heads=2, dim=12, dropout=0.2)
    if save is not None:
        for block in gpt.blocks:
            block.forward = mt.checkpoint(block.forward, save=save)
    model = wrap(gpt)
    tokens = np.random.default_rng(2).integers(0, 11, (5, 7))
    with backend.random_scope(0, 1, 5, (0, 5)), ledger.record(memory=True) as book:
        with mt.autocast("bfloat16", enabled=autocast):
            loss = nn.cross_entropy(model(tokens).reshape(-1, 11), tokens.reshape(-1))
        kept = book.live["activation"]
        loss.backward()
    return [loss.item(), *(p.grad.numpy().copy() for p in model.parameters() if p.grad is not None)], kept


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: DistributedDataParallel(model, comm.world()),
                                  lambda model: fully_shard(model, comm.world(), stage=3)], ids=["", "ddp", "sharded"])
def test_a_gpt_has_the_same_bits_and_saved_ops_run_once(forwards, wrap, autocast):
    plain, all_kept = gpt_step(None, wrap, autocast)
    once = dict(forwards)
    found = {}
    for save in ((), PRODUCTS, "attention"):
        forwards.clear()
        again, found[save] = gpt_step(save, wrap, autocast)
        for a, b in zip(plain, again, strict=True):
            np.testing.assert_array_equal(a, b)
        for name in ("linear", "attention", "layer_norm"):
            inside = once[name] - (name == "layer_norm")        # the last one is behind the blocks
            assert forwards[name] == once[name] + inside * (name not in save), (save, name)
    assert found[()] < found["attention"] < found[PRODUCTS] < all_kept


def test_what_is_kept_is_what_it_starts_from_and_the_results():
    """tanh's and the square's are made again."""
    x = mt.tensor(np.ones((3, 5)), requires_grad=True)
    w = mt.tensor(np.full((5, 8), 0.1), requires_grad=True)

    def f(x):
        return mt.square(mt.tanh(mt.exp(x) @ w)).sum()
    kept = {}
    for save in (None, (), "matmul"):
        with ledger.record(memory=True) as book:
            y = f(x) if save is None else mt.checkpoint(f, save=save)(x)
            kept[save] = book.live["activation"] + book.live["parameter"]
        y.backward()
    start = x.data.nbytes + w.data.nbytes
    assert kept[()] == start and kept["matmul"] == start + 3 * 8 * 8
    assert kept[None] > kept["matmul"]


def f3(x, wrap):
    g = wrap(lambda z: mt.sin(z) * z)
    return mt.sum(g(wrap(lambda z: z * z)(x)))


@pytest.mark.parametrize("save", ["mul", "sin", "sin mul"])
def test_transforms_through_it(save):
    plain, again = (lambda x, w=w: f3(x, w) for w in (
        lambda f: f, lambda f: mt.checkpoint(f, save=save.split())))
    for d in (mt.grad, lambda f: lambda x: mt.hvp(f, x, X), mt.hessian, lambda f: mt.jacrev(mt.grad(f)),
              lambda f: lambda x: mt.jvp(f, (x,), (x,))[1], lambda f: lambda x: mt.linearize(f, x)[1](x),
              lambda f: mt.jacfwd(mt.grad(lambda x: mt.sum(mt.grad(f)(x) ** 2.0)))):
        np.testing.assert_allclose(d(again)(X), d(plain)(X), rtol=1e-12)
    for create in (False, True):
        x = mt.tensor(X, requires_grad=True)
        again(x).backward(create_graph=create)
        np.testing.assert_allclose(lower(x.grad), mt.grad(plain)(X), rtol=1e-12)
    first, x.grad = x.grad, None
    first.sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), mt.grad(lambda x: mt.sum(mt.grad(plain)(x)))(X), rtol=1e-12)


def lower(x):
    return x.detach().numpy()


def test_checkpoints_in_checkpoints(forwards):
    """The inner one's first run is a part of the outer one's second, and saves for itself where it saves."""
    linear = nn.Linear(3, 3)

    def gradient(outer, inner):
        x = mt.tensor(np.ones((2, 3)), requires_grad=True)
        forwards.clear()
        outer(lambda x: inner(lambda x: mt.tanh(linear(x)))(linear(mt.exp(x))))(x).sum().backward()
        return x.grad.numpy(), forwards["linear"]
    plain, once = gradient(lambda f: f, lambda f: f)
    for outer, inner, more in (("linear", "linear", 1), ("linear", (), 1), ((), "linear", 2), ((), (), 3)):
        again, times = gradient(*[lambda f, save=save: mt.checkpoint(f, save=save) for save in (outer, inner)])
        np.testing.assert_array_equal(again, plain)
        assert times == once + more, (outer, inner)


def test_what_changes_in_between_is_noticed():
    """Although the saved result hides it from everything behind."""
    constant, w = np.ones(3), mt.tensor(np.eye(3), requires_grad=True)
    x = mt.tensor(np.ones((2, 3)), requires_grad=True)
    y = mt.checkpoint(lambda x: (x * constant) @ w, save="matmul")(x).sum()
    constant[1] = 2.0
    with pytest.raises(RuntimeError, match="second run gave other values"):
        y.backward()


def test_saved_results_must_not_be_overwritten():
    x, seen = mt.tensor(np.ones((2, 3)), requires_grad=True), []

    def f(x):
        seen.append(x @ np.eye(3))
        return seen[-1] * 2.0
    y = mt.checkpoint(f, save="matmul")(x).sum()
    with mt.no_grad():
        seen[0][0] = 5.0
    with pytest.raises(RuntimeError, match="needs its 'saved result' of shape \\(2, 3\\)"):
        y.backward()


@pytest.mark.parametrize("second, said", [
    (lambda x: mt.sin(x @ np.eye(3)), "came to 'sin' where the first had 'matmul'"),
    (lambda x: mt.sin(x @ np.eye(3)) @ np.eye(3), "came to 'sin' where the first had 'matmul'"),
    (lambda x: x @ np.eye(3) @ np.eye(3) @ np.eye(3), "came to 'matmul' where the first had done")])
def test_a_second_run_that_goes_another_way(second, said):
    runs = iter([lambda x: x @ np.eye(3) @ np.eye(3), second])
    y = mt.checkpoint(lambda x: next(runs)(x), save=("matmul", "sin"))(mt.tensor(np.ones((2, 3)), requires_grad=True))
    with pytest.raises(RuntimeError, match=said):
        y.sum().backward()
    assert state.recall is None and not state.special


def test_fewer_ops_in_the_second_run():
    runs = iter([lambda x: x @ np.eye(3) @ np.eye(3), lambda x: x @ np.eye(3)])
    y = mt.checkpoint(lambda x: next(runs)(x), save="matmul")(mt.tensor(np.ones((2, 3)), requires_grad=True))
    with pytest.raises(RuntimeError, match="second run gave other values"):
        y.sum().backward()


def test_backward_twice_and_what_is_freed():
    gc.collect()
    gc.disable()
    try:
        seen = []

        def f(x):
            h = x @ np.eye(3)
            seen.append(weakref.ref(h.data))
            return mt.tanh(h)
        x = mt.tensor(np.full((2, 3), 0.5), requires_grad=True)
        y = mt.checkpoint(f, save="matmul")(x).sum()
        assert seen[0]() is not None
        y.backward(retain_graph=True)
        assert seen[0]() is not None
        y.backward()
        assert seen[0]() is None
        np.testing.assert_allclose(x.grad.numpy(), 2 - 2 * np.tanh(0.5) ** 2 + np.zeros((2, 3)))
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_where_nothing_is_recorded_nothing_is_saved():
    f = mt.checkpoint(lambda x: x @ np.eye(3), save="matmul")
    np.testing.assert_array_equal(f(np.ones((2, 3))), np.ones((2, 3)))
    with mt.no_grad():
        y = f(mt.tensor(np.ones((2, 3)), requires_grad=True))
    assert not y.requires_grad and state.recall is None


def test_an_op_that_is_none():
    with pytest.raises(ValueError, match=r"save=attend, mat_mul: there is no such op; print\(mt.OPS\) lists"):
        mt.checkpoint(mt.exp, save=("mat_mul", "attend", "matmul"))
    for save in (mt.matmul, [mt.matmul], None, ["matmul", 3]):      # the functions of these names are none
        with pytest.raises(ValueError, match="checkpoint: save=.*no such op.*names"):
            mt.checkpoint(mt.exp, save=save)


def test_a_function_that_writes_into_a_saved_result():
    """Its second run begins with what the op gave, not with what was written. A softmax's sum shows no difference."""
    w = mt.tensor(np.array([[1.0, 2.0, 0.5], [3.0, -4.0, 0.1]]), requires_grad=True)

    def f(x):
        h = mt.reshape(x @ w, (6,))
        with mt.no_grad():
            h[...] = h.numpy() * 0.5
        return mt.softmax(mt.reshape(h, (2, 3)), -1)
    found = {}
    for save in (None, (), "matmul", ("matmul", "reshape"), tuple(OPS)):
        x = mt.tensor(X[:2] * np.eye(2), requires_grad=True)
        y = (f if save is None else mt.checkpoint(f, save=save))(x)
        for retain in (True, False):
            y.backward(np.arange(6.0).reshape(2, 3), retain_graph=retain)
        found[save] = x.grad.numpy()
        np.testing.assert_array_equal(found[save], found[None])
