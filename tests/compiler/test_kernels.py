"""How many kernels, how much memory, and whose: counted by the ledger."""

import gc

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import ledger, nn

from .compare import EMITS, arrays, run

RANDOM = np.random.default_rng(0)
X, LABELS = RANDOM.standard_normal((33, 65)), RANDOM.integers(0, 65, 33)
ROW, SECOND = RANDOM.standard_normal(65), RANDOM.standard_normal(65)


def launches(function, *args):
    """(kernels of forward, kernels of backward) of a second call."""
    compiled = mt.compile(function, emit="c")
    run(compiled, args)
    leaves = [mt.tensor(a, requires_grad=True) if a.dtype.kind == "f" else a for a in args]
    with ledger.record() as forward:
        y = compiled(*leaves)
    with ledger.record() as backward:
        y.backward(mt.tensor(np.ones(y.shape)))
    assert not compiled.breaks
    return forward.launches.total(), backward.launches.total()


def gelu_chain(x, w, b):
    return mt.gelu(x * w + b) * 2.0 - x


ONE_KERNEL = {      # name -> (function, arguments, kernels of backward; None: nothing is promised)
    "softmax": (mt.softmax, (X,), 1),
    "log_softmax": (mt.log_softmax, (X,), 1),
    "layer_norm": (lambda x, w, b: mt.layer_norm(x, 65, w, b), (X, ROW, SECOND), 1),
    "rms_norm": (lambda x, w: mt.rms_norm(x, 65, w), (X, ROW), 1),
    "cross_entropy": (mt.softmax_cross_entropy, (X, LABELS), None),
    "gelu": (mt.gelu, (X,), 1),
    "swiglu": (mt.swiglu, (X, X[::-1].copy()), 1),
    "gelu chain": (gelu_chain, (X, ROW, SECOND), 1),
    "tanh gelu chain": (lambda x, w, b: mt.gelu(x * w + b, approximate="tanh"), (X, ROW, SECOND), 1),
    "sums": (lambda x: mt.sum(mt.exp(x) * x), (X,), 1),
    "elementwise": (lambda x, y: mt.relu(x * y + 1.0) * mt.sigmoid(x) / (1.0 + mt.absolute(y)), (X, X[::-1].copy()), 1),
}


@pytest.mark.parametrize("name", ONE_KERNEL)
def test_one_kernel(name):
    function, args, backward = ONE_KERNEL[name]
    forward, pulled = launches(function, *args)
    assert forward == 1 and backward in (pulled, None)


def test_launches_are_named_by_their_ops():
    compiled = mt.compile(mt.softmax, emit="c")
    with ledger.record() as book:
        compiled(mt.tensor(X))
        compiled(mt.tensor(X))
    (name, times), = book.launches.items()
    assert times == 2 and {"max", "exp", "sum"} <= set(name.split("+"))


def kept(function, *args):
    """Bytes that the tape keeps of a call, of arguments that are no leaves."""
    leaves = [mt.tensor(a, requires_grad=True) * 1.0 for a in args]
    function(*leaves)       # a graph is made in peace
    gc.collect()
    with ledger.record(memory=True) as book:
        y = function(*leaves)
        peak = book.peak["activation"]
        y.sum().backward()
    return peak


@pytest.mark.parametrize("emit", EMITS)
@pytest.mark.parametrize("name", ["gelu chain", "tanh gelu chain", "elementwise", "layer_norm"])
def test_backward_keeps_no_more_than_eager(name, emit):
    function, args, _ = ONE_KERNEL[name]
    ours, theirs = kept(mt.compile(function, emit=emit), *args), kept(function, *args)
    assert 0 < ours <= theirs


def test_backward_of_an_elementwise_chain_keeps_its_arguments_only():
    def chain(x, y):
        for _ in range(6):
            x = mt.relu(x * y + 0.5) - y
        return x
    args = (X, X[::-1].copy())
    assert kept(mt.compile(chain, emit="c"), *args) == 2 * X.nbytes
    assert kept(chain, *args) >= 7 * X.nbytes


def owner(array):
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


@pytest.mark.parametrize("emit", EMITS)
def test_results_and_gradients_are_arrays_of_their_own(emit):
    """Nobody who writes into one array changes another one."""
    def f(x, w):
        t = mt.transpose(x)
        return [x, mt.reshape(x, -1), t, x * 1.0, x[1:], mt.broadcast_to(w, (3, 4)), mt.exp(x), mt.exp(x), x + w,
                mt.reshape(mt.exp(x), 12), x @ t, w]
    x, w = np.arange(12.0).reshape(3, 4), np.ones(4)
    compiled = mt.compile(f, emit=emit)
    for _ in range(2):
        leaves = [mt.tensor(a, requires_grad=True) for a in (x, w)]
        outs = compiled(*leaves)
        sum(out.sum() for out in outs).backward()
        everything = [*arrays(outs), *(leaf.grad.numpy() for leaf in leaves), *(leaf.data for leaf in leaves)]
        owners = [id(owner(a)) for a in everything]
        eager = [id(owner(a)) for a in arrays(f(*leaves))]
        assert len(set(owners)) == len(owners), f"{len(owners)} arrays in {len(set(owners))}; eager {len(set(eager))}"
        assert all(owner(a).nbytes == a.nbytes for a in everything)


@pytest.mark.parametrize("emit", EMITS)
def test_what_backward_keeps_is_no_output(emit):
    """Nobody who writes into an output changes a gradient."""
    x = mt.tensor([0.5, 1.0], requires_grad=True)
    y = mt.compile(lambda x: mt.tanh(x) * 1.0, emit=emit)(x)
    z = mt.compile(mt.tanh, emit=emit)(x)
    y.data[...] = z.data[...] = 0
    (y.sum() + z.sum()).backward()
    np.testing.assert_allclose(x.grad.numpy(), 2 - 2 * np.tanh([0.5, 1.0]) ** 2)


@pytest.mark.parametrize("emit", EMITS)
def test_parameters_gradients_are_their_own(emit):
    """Two parameters with the same gradient, and two steps: adding into one leaves the others alone."""
    a, b = (mt.tensor(ROW, requires_grad=True) for _ in "ab")
    f = mt.compile(lambda x: mt.sum(x * (a + b)), emit=emit)
    f(mt.tensor(X)).backward()
    first = a.grad.numpy().copy()
    assert owner(a.grad.data) is not owner(b.grad.data)
    a.grad.data[...] = 0
    np.testing.assert_array_equal(b.grad.numpy(), first)
    b.grad = None
    f(mt.tensor(X)).backward()
    np.testing.assert_array_equal(a.grad.numpy(), first)
    np.testing.assert_array_equal(b.grad.numpy(), first)


def test_numbers_of_no_axes_are_arrays_too():
    """0-d cotangents, and what a product of vectors gives, are NumPy's scalars: their memory must live on."""
    def f(x, v):
        h = mt.exp(x) * (v @ v)
        return [h, mt.sum(h * x), h - x, mt.tanh(h)]
    compiled = mt.compile(f, emit="c")
    for seed in range(4):
        for a, b in zip(run(compiled, (np.array(0.3), ROW[:3]), seed), run(f, (np.array(0.3), ROW[:3]), seed),
                        strict=True):
            np.testing.assert_allclose(a[0], b[0], rtol=1e-12)
            np.testing.assert_allclose(a[1], b[1], rtol=1e-12)


def test_a_model_has_fewer_kernels_than_ops():
    mt.manual_seed(0)
    model = mt.compile(nn.GPT(17, 8, layers=2, heads=2, dim=8, dtype=np.float64), emit="c")
    tokens = np.arange(16).reshape(2, 8)
    model(tokens)
    with ledger.record() as book:
        model(tokens)
    ops = len(model.compiled.variants[0].captured.nodes)
    assert 0 < book.launches.total() < ops / 3


def test_what_it_shows():
    """Every stage, as text: names of ops, roles, C."""
    compiled = mt.compile(lambda x, w: mt.softmax(mt.exp(x @ w) * 1 * 2.0 + 0.0 * mt.exp(x @ w)), emit="c")
    run(compiled, (X[:, :5], X[:5]))
    captured, optimized = compiled.show("captured"), compiled.show("optimized")
    assert captured.count("matmul") == 2 and optimized.count("matmul") == 1
    assert "kernel of 33 rows · 65 columns" in compiled.show() and "(row)" in compiled.show("fused")
    assert "void kernel" in compiled.show("kernels") and "#pragma omp simd" in compiled.show("kernels")
    assert "matmul" in compiled.show("optimized backward")
    with pytest.raises(ValueError, match="captured, optimized"):
        compiled.show("everything")
    plain = mt.compile(mt.softmax, emit="numpy")
    plain(mt.tensor(X))
    assert "void" not in plain.show("kernels")


def test_kernels_for_other_strides():
    """A graph is kept where only the memory layout differs; its kernels are made anew."""
    def f(x, y):
        return mt.exp(mt.transpose(x)) * mt.transpose(y) + mt.sum(x, 1)
    compiled = mt.compile(f, emit="c")
    x = RANDOM.standard_normal((5, 7))
    for a, b in ((x, x), (np.asfortranarray(x), x), (x, x[::-1]), (x[:, ::-1], np.asfortranarray(x))):
        given = [mt.from_numpy(v) for v in (a, b)]
        np.testing.assert_allclose(compiled(*given).numpy(), f(*given).numpy(), rtol=1e-13)
    assert len(compiled.variants) == 1
    assert not compiled.breaks


def test_cotangents_of_any_strides():
    """Backward's kernels meet cotangents as the rest of the program makes them: broadcast, turned, contiguous."""
    f = lambda x: mt.tanh(x) * mt.exp(x)    # noqa: E731
    compiled, x = mt.compile(f, emit="c"), RANDOM.standard_normal((5, 7))
    ends = (mt.sum, lambda y: (mt.transpose(y) * np.arange(35.0).reshape(7, 5)).sum(), lambda y: (y * x).sum(),
            lambda y: mt.sum(mt.sum(y, 1) * np.arange(5.0)), lambda y: y[::-1, ::2].sum(), lambda y: y.sum())
    for end in ends:
        gradients = []
        for function in (compiled, f):
            leaf = mt.tensor(x, requires_grad=True)
            end(function(leaf)).backward()
            gradients.append(leaf.grad.numpy())
        np.testing.assert_allclose(*gradients, rtol=1e-12, atol=1e-14)
    for ct in (x, np.asfortranarray(x), np.broadcast_to(x[:1], x.shape), x[::-1, ::-1], np.broadcast_to(2.0, x.shape)):
        gradients = []
        for function in (compiled, f):
            leaf = mt.tensor(x, requires_grad=True)
            function(leaf).backward(mt.from_numpy(ct))
            gradients.append(leaf.grad.numpy())
        np.testing.assert_allclose(*gradients, rtol=1e-12, atol=1e-14)
    assert len(compiled.variants) == 1


def test_what_is_costly_is_computed_once():
    """softmax's exp, which is summed and then divided, is kept in a row; what is cheap is done again."""
    compiled = mt.compile(mt.softmax, emit="c")
    compiled(mt.tensor(X))
    source = compiled.show("kernels")
    assert source.count("exp(") == 1 and source.count("for (long c") == 3
    norm = mt.compile(lambda x: mt.layer_norm(x, 65), emit="c")
    norm(mt.tensor(X))
    assert "kept_" not in norm.show("kernels")


def test_parameters_of_any_strides():
    """What a function takes from elsewhere comes as it lies in memory."""
    weights = {"w": mt.from_numpy(np.asfortranarray(RANDOM.standard_normal((7, 5))))}
    w = mt.from_numpy(RANDOM.standard_normal((14, 10))[::-2, ::2]).requires_grad_()

    def f(x):
        return mt.relu(x @ w + 1.0) * mt.sum(w * weights["w"], 0)
    compiled, x = mt.compile(f, emit="c"), mt.tensor(RANDOM.standard_normal((3, 7)))
    for _ in range(2):
        w.grad = None
        compiled(x).sum().backward()
        ours, w.grad = w.grad.numpy(), None
        f(x).sum().backward()
        np.testing.assert_allclose(ours, w.grad.numpy(), rtol=1e-12)
        np.testing.assert_allclose(compiled(x).numpy(), f(x).numpy(), rtol=1e-12)


@pytest.mark.parametrize("window, whole", [(9, True), (150, False)])
def test_attention_stays_whole_where_its_own_kernel_leaves_most_out(window, whole):
    shapes = (1, 2, 200, 4), (1, 1, 200, 4), (1, 1, 200, 3)
    leaves = [mt.tensor(RANDOM.standard_normal(shape), requires_grad=True) for shape in shapes]

    def f(q, k, v):
        return mt.sum(mt.sin(mt.scaled_dot_product_attention(q * 2, k, v, is_causal=True, window=window)))
    compiled, gradients = mt.compile(f, emit="c"), []
    for function in (compiled, f):
        for x in leaves:
            x.grad = None
        function(*leaves).backward()
        gradients.append([x.grad.numpy() for x in leaves])
    for ours, wanted in zip(*gradients, strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=1e-10, atol=1e-12)
    assert (" attention(" in compiled.show("captured")) == whole
    assert ("200, 200" in compiled.show("captured")) != whole
