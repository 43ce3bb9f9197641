"""Autocast: every op has its class, casts are made once and are never stale, and what is computed is what a model of
rounding in plain NumPy computes."""

import subprocess
import sys

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import ledger, nn, optim
from minitorch_dist.autodiff.autocast import CLASSES, Region
from minitorch_dist.autodiff.input_first import InputFirst
from minitorch_dist.autodiff.primitive import state
from minitorch_dist.kernels import cublas
from tests.device import fake_cublas
from tests.device.fake_cupy import installed, transfers

EPS = 2.0 ** -10        # of float16
rng = np.random.default_rng(11)


def randn(*shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


def leaf(*shape):
    return mt.tensor(randn(*shape), requires_grad=True)


def rounded(a):
    return np.asarray(a).astype(np.float16).astype(np.float32)


def distance(a, b):
    return np.linalg.norm(np.float64(a) - b) / np.linalg.norm(np.float64(b))


# ---------------------------------------------------------------- which op runs in what

ALL_OPS = """
import importlib, pkgutil, minitorch_dist
for found in pkgutil.walk_packages(minitorch_dist.__path__, "minitorch_dist."):
    if not found.name.endswith(("__main__", "_child")):
        try:
            importlib.import_module(found.name)
        except ImportError:         # of what isn't installed
            pass
print(*minitorch_dist.OPS)
"""     # in a process of its own: tests enter some, too


def test_each_op_of_the_library_has_one_class():
    names = [name for text in CLASSES.values() for name in text.split()]
    run = subprocess.run([sys.executable, "-c", ALL_OPS], capture_output=True, text=True, check=True, timeout=60)
    assert len(names) == len(set(names)) and sorted(names) == sorted(run.stdout.split())


IMAGE, KERNEL, HEADS = (2, 3, 5, 6), (4, 3, 2, 3), (2, 2, 4, 5)
LOW = {     # by hand, from the list in torch's documentation: op -> (function, shapes)
    "matmul": (mt.matmul, (3, 4), (4, 2)), "vector": (mt.matmul, (3, 4), (4,)), "linear": (mt.linear, (3, 4), (2, 4)),
    "bias": (mt.linear, (3, 4), (2, 4), (2,)), "linear_gelu": (mt.linear_gelu, (3, 4), (2, 4), (2,)),
    "conv2d": (mt.conv2d, IMAGE, KERNEL, (4,)), "conv1d": (mt.conv1d, (2, 3, 7), (4, 3, 2)),
    "conv_transpose": (mt.conv_transpose2d, IMAGE, (3, 2, 2, 2)), "tensordot": (mt.tensordot, (2, 3, 4), (3, 4, 5)),
    "einsum": (lambda x, y: mt.einsum("ij,kj->ik", x, y), (3, 4), (2, 4)),
    "attention": (mt.scaled_dot_product_attention, HEADS, HEADS, HEADS),
}
WIDE = {
    "exp": mt.exp, "log": lambda x: mt.log(mt.square(x) + 1), "pow": lambda x: x ** 3, "softmax": mt.softmax,
    "log_softmax": mt.log_softmax, "sum": mt.sum, "mean": mt.mean, "var": mt.var, "prod": mt.prod, "cumsum": mt.cumsum,
    "rsqrt": lambda x: mt.rsqrt(mt.square(x)), "layer_norm": lambda x: mt.layer_norm(x, 4),
    "dot": lambda x: mt.dot(x, x), "rms_norm": lambda x: mt.rms_norm(x, 4),
    "batch_norm": lambda x: mt.batch_norm(x)[0], "logsumexp": mt.logsumexp,
    "cross_entropy": lambda x: nn.cross_entropy(x, np.arange(3)), "mse": lambda x: nn.mse_loss(x, 2 * x),
}
AS_GIVEN = {
    "relu": mt.relu, "tanh": mt.tanh, "sigmoid": mt.sigmoid, "gelu": mt.gelu, "add": lambda x: x + 1.0, "max": mt.max,
    "mul": lambda x: x * x, "getitem": lambda x: x[1:], "reshape": lambda x: x.reshape(-1), "sqrt": mt.sqrt,
    "concatenate": lambda x: mt.concatenate([x, x]), "dropout": mt.dropout, "where": lambda x: mt.where(x > 0, x, 0.0),
}


@pytest.mark.parametrize("op", LOW)
def test_products_run_in_16_bits(op):
    function, *shapes = LOW[op]
    args = [leaf(*shape) for shape in shapes]
    with mt.autocast("float16"):
        y = function(*args)
        raw = function(*(a.numpy() for a in args))
        wide = function(*(a.astype(np.float64) for a in args))
    assert y.dtype == raw.dtype == np.float16 and wide.dtype == np.float64
    np.testing.assert_array_equal(y.numpy(), raw)
    y.backward(mt.tensor(randn(*y.shape, dtype=np.float16)))
    assert all(a.grad.dtype == np.float32 for a in args)


@pytest.mark.parametrize("op", WIDE)
def test_what_16_bits_are_too_few_for_runs_in_float32(op):
    x = leaf(3, 4)
    with mt.autocast("float16"):
        y = WIDE[op](x.astype(np.float16))
    assert y.dtype == np.float32
    assert WIDE[op](x.astype(np.float16)).dtype == np.float16
    assert np.any(y.numpy() != rounded(y.numpy()))      # not only widened afterwards


@pytest.mark.parametrize("op", AS_GIVEN)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_all_others_take_what_comes(op, dtype):
    x = mt.tensor(np.abs(randn(3, 4, dtype=dtype)) + 1)
    with mt.autocast("float16"):
        assert AS_GIVEN[op](x).dtype == dtype


def test_mixed_operands_promote():
    low, wide = mt.tensor(randn(3, 4, dtype=np.float16)), mt.tensor(randn(3, 4))
    with mt.autocast("float16"):
        for y in (low + wide, wide * low, mt.maximum(low, wide), mt.concatenate([low, wide]),
                  mt.where(wide > 0, low, wide)):
            assert y.dtype == np.float32


def test_float64_has_the_bits_that_it_has_without():
    mt.manual_seed(2)
    model, x = nn.mlp((7, 6), dtype=np.float64), randn(3, 784, dtype=np.float64)

    def run():
        model.zero_grad()
        nn.cross_entropy(model(x), np.arange(3)).backward()
        return [p.grad.numpy().copy() for p in model.parameters()]
    without = run()
    with mt.autocast("float16"):
        within = run()
    for a, b in zip(without, within, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_product_with_float64_has_all_of_its_bits():
    w, x = np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4), np.linspace(1, 2, 8).reshape(4, 2)
    with mt.autocast("float16"):
        found = mt.matmul(mt.tensor(w), mt.tensor(x))
    np.testing.assert_array_equal(found.numpy(), w @ x)


def test_the_table_prints():
    lines = {line[:8].strip(): line[8:].split() for line in mt.autocast_table().splitlines()}
    assert list(lines) == list(CLASSES) and "linear" in lines["16 bits"] and "softmax" in lines["float32"]


# ---------------------------------------------------------------- what is computed

def test_a_layer_is_what_rounding_in_plain_numpy_gives():
    """relu(x Wᵀ + b) Vᵀ and a loss: float32 products of rounded operands, rounded once. To the last bit."""
    x, w, b, v = randn(5, 7), randn(6, 7), randn(6), randn(4, 6)
    labels = np.array([0, 3, 1, 2, 0])
    leaves = [mt.tensor(a, requires_grad=True) for a in (x, w, b, v)]
    with mt.autocast("float16"):
        hidden = mt.relu(mt.linear(*leaves[:3]))
        loss = nn.cross_entropy(mt.linear(hidden, leaves[3]), labels, reduction="sum")
    loss.backward()

    h = rounded(rounded(x) @ rounded(w).T + rounded(b))
    mask = h > 0
    h *= mask
    logits = rounded(h @ rounded(v).T)
    z = logits - logits.max(1, keepdims=True)
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    assert loss.dtype == np.float32
    np.testing.assert_allclose(loss.item(), -np.log(p[np.arange(5), labels]).sum(), rtol=1e-5)
    p[np.arange(5), labels] -= 1
    gl = rounded(p)
    gh = rounded(rounded(gl @ rounded(v)) * mask)
    wanted = rounded(gh @ rounded(w)), rounded(gh.T @ rounded(x)), rounded(gh.sum(0)), rounded(gl.T @ h)
    for got, expected in zip(leaves, wanted, strict=True):
        assert got.grad.dtype == np.float32
        # Where float32 rounds p another way, and that falls on a boundary of float16: one unit there.
        np.testing.assert_allclose(got.grad.numpy(), expected, rtol=2 * EPS, atol=2e-6)
        assert np.mean(got.grad.numpy() == expected) > 0.9


MODELS = {      # name -> (constructor, input, tolerance in units of EPS)
    "mlp": (lambda: nn.mlp((16, 12)), lambda: randn(6, 784), 2),
    "lenet": (nn.lenet, lambda: randn(6, 784), 40),         # of a maximum another element may win
    "gpt": (lambda: nn.GPT(11, 6, layers=2, heads=2, dim=8), lambda: rng.integers(0, 11, (6, 6)), 4),
    "gpt, rotary": (lambda: nn.GPT(11, 6, layers=1, heads=4, kv_heads=2, dim=8, positions="rotary", norm="rms",
                                   tied=False), lambda: rng.integers(0, 11, (6, 6)), 4),
}


def passes(model, x, inside=False):
    """The gradients of a model's loss under autocast; backward outside of it, or inside."""
    labels = x if x.dtype.kind == "i" else np.arange(6)
    model.zero_grad()
    with mt.autocast("float16"):
        loss = nn.cross_entropy(model(x), labels)
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    return [p.grad.numpy().copy() for p in model.parameters()]


@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_gradients_of_float32_but_for_rounding(name):
    make, inputs, tolerance = MODELS[name]
    mt.manual_seed(3)
    model, x = make(), inputs()
    model.zero_grad()
    nn.cross_entropy(model(x), x if x.dtype.kind == "i" else np.arange(6)).backward()
    exact = [p.grad.numpy().copy() for p in model.parameters()]
    low = passes(model, x)
    for a, b in zip(low, exact, strict=True):
        assert a.dtype == np.float32 and 0 < distance(a, b) < tolerance * EPS
    for a, b in zip(low, passes(model, x, inside=True), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("function, shapes", [
    (np.matmul, ((3, 500), (500, 4))), (mt.matmul, ((2, 3, 500), (2, 500, 4))), (mt.linear, ((3, 500), (4, 500), (4,))),
    (lambda x, y: mt.einsum("bij,bkj->bik", x, y), ((2, 3, 500), (2, 4, 500))),
    (lambda x, y, z: mt.einsum("ij,jk,kl->il", x, y, z), ((20, 30), (30, 20), (20, 4))),
    (mt.conv2d, (IMAGE, KERNEL, (4,))),
    (mt.scaled_dot_product_attention, (HEADS, HEADS, HEADS)), (lambda x: mt.layer_norm(256 * x, 60), ((3, 60),)),
    (lambda x: mt.sum(x, 0), ((500, 3),)), (mt.softmax, ((3, 500),)), (lambda x: mt.cumsum(x, 0), ((3, 5),)),
    (lambda x: mt.mean(400 * x, 1), ((3, 500),)), (lambda x: mt.var(x, 0), ((500, 3),)),
    (lambda x: x[np.arange(600) % 3], ((3, 2),)),
    (lambda x, w, b: mt.batch_norm(x, w, b)[0], ((600, 3), (3,), (3,)))])
def test_16_bits_on_the_host_are_computed_in_float32_and_rounded_once(function, shapes):
    if function is np.matmul:
        function = mt.backend.matmul
    args = [randn(*shape, dtype=np.float16) for shape in shapes]
    found, expected = function(*args), function(*(a.astype(np.float64) for a in args))
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, expected, rtol=0.51 * EPS, atol=1e-6)     # half a unit, and float32's rounding
    tensors = [mt.tensor(a, requires_grad=True) for a in args]
    wide = [mt.tensor(a.astype(np.float64), requires_grad=True) for a in args]
    ct = randn(*expected.shape, dtype=np.float16)
    if function is not mt.backend.matmul:
        function(*tensors).backward(mt.tensor(ct))
        function(*wide).backward(mt.tensor(ct.astype(np.float64)))
        for a, b in zip(tensors, wide, strict=True):
            assert a.grad.dtype == np.float16 and distance(a.grad.numpy(), b.grad.numpy()) < EPS


def test_more_than_float16_can_count():
    ones = mt.tensor(np.ones((5000, 1), np.float16), requires_grad=True)
    assert mt.cumsum(ones, 0)[-1, 0].item() == 5000 and mt.mean(mt.tensor(np.full(70_000, 3, np.float16))).item() == 3
    row = mt.tensor(np.ones((1, 1), np.float16), requires_grad=True)
    row[np.zeros(5000, int)].backward(mt.tensor(np.ones((5000, 1), np.float16)))
    assert row.grad.item() == 5000


def test_a_product_goes_where_it_is_wanted():
    x, y = randn(3, 4, dtype=np.float16), randn(4, 2, dtype=np.float16)
    for dtype in (np.float16, np.float32):
        out = np.full((3, 2), np.nan, dtype)
        assert mt.backend.matmul(x, y, out=out) is out
        np.testing.assert_array_equal(out, mt.backend.matmul(x, y))


def test_rounding_to_float16_is_numpys():
    """All magnitudes, halves between two neighbours, signs of zeros, inf and NaN; in arrays of any strides."""
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    every = every[np.isfinite(every)]
    between = (np.sort(every)[1:] + np.sort(every)[:-1]) / 2
    x = np.concatenate([every, between, np.nextafter(between, np.float32(np.inf)), np.float32(10) ** randn(5000) * 1e-7,
                        -np.float32(2) ** rng.uniform(-149, 18, 5000), [65520, np.inf, np.nan, -0.0]]).astype("f4")
    with np.errstate(all="ignore"):
        expected = x.astype(np.float16)
    for found in (mt.backend.to_half(x), mt.backend.to_half(x[::-1])[::-1], [mt.backend.to_half(v) for v in x[-3:]]):
        np.testing.assert_array_equal(np.asarray(found).view(np.uint16), expected[-len(found):].view(np.uint16))
    assert mt.backend.to_half(np.float64([1 / 3])).dtype == np.float16


@pytest.mark.filterwarnings("error")
def test_what_is_too_large_becomes_inf_without_a_word():
    x = np.full((2, 2), 300, np.float32)
    with mt.autocast("float16"):
        assert np.isinf(mt.matmul(x, x)).all()
        assert mt.sum(mt.tensor(x).astype(np.float16) * 100).item() == 120_000


# ---------------------------------------------------------------- casts

def low_weights(*ys):
    """What the last linear op of each value has saved as its weight."""
    return [y.node.saved[y.node.primitive.layout.index("weight")] for y in ys]


def test_a_parameter_is_cast_once_in_a_region_and_anew_in_the_next():
    layer, x = nn.Linear(4, 3), randn(2, 4)
    with mt.autocast("float16"):
        with mt.autocast("float16"):
            first, second = low_weights(layer(x), layer(x))
        third, = low_weights(layer(x))
    assert first is second is third and first.dtype == np.float16
    with mt.autocast("float16"):
        fourth, = low_weights(layer(x))
    assert fourth is not first
    np.testing.assert_array_equal(fourth, first)
    bare = nn.Linear(4, 3, bias=False)
    with mt.autocast("float16"):
        one, two = (bare(leaf(2, 4)).node.saved[2] for _ in range(2))       # the second operand of a product
    assert np.shares_memory(one, two)


@pytest.mark.parametrize("bias", [True, False])
def test_no_cast_is_stale(bias):
    layer, x = nn.Linear(4, 3, bias=bias), randn(2, 4)
    other, optimizer = nn.Linear(4, 3), optim.SGD(layer.parameters(), lr=0.5)
    with mt.autocast("float16"):
        cast = Region.lowered(state.autocast, layer.weight).data
        other(x)
        for _ in range(3):
            optimizer.zero_grad()
            mt.sum(layer(x)).backward()
            optimizer.step()            # also moves the weight into a flat buffer
            values = rounded(x) @ rounded(layer.weight.numpy()).T + (rounded(layer.bias.numpy()) if bias else 0)
            np.testing.assert_array_equal(layer(x).numpy(), values.astype(np.float16))
        with mt.no_grad():
            layer.weight[...] = 2 * np.ones((3, 4), np.float32)
        assert np.all(Region.lowered(state.autocast, layer.weight).numpy() == 2)
        unwritten = Region.lowered(state.autocast, other.weight).data
        with mt.no_grad():
            layer.weight[...] = 0
        assert Region.lowered(state.autocast, other.weight).data is unwritten is not cast
        layer.weight.data = np.full((3, 4), 3, np.float32)      # as who moves parameters does
        assert np.all(Region.lowered(state.autocast, layer.weight).numpy() == 3)


def test_an_update_by_hand_is_seen_after_a_backward():
    w = mt.tensor(np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4), requires_grad=True)
    x = mt.tensor(np.linspace(1, 2, 8, dtype=np.float32).reshape(4, 2))
    with mt.autocast("float16"):
        before = mt.matmul(w, x)
        mt.sum(before).backward()
        w.data[...] -= 0.5
        after = mt.matmul(w, x)
    np.testing.assert_array_equal(after.numpy(), mt.backend.matmul(w.numpy().astype(np.float16),
                                                                   x.numpy().astype(np.float16)))
    assert (after.numpy() != before.numpy()).any()


def test_gradients_of_several_uses_add_up_in_float32():
    w, x = leaf(3, 4), np.ones((1, 4), np.float32)
    with mt.autocast("float16"):
        for k in range(9):      # 2048 + 8 ones; float16 has no 2049
            mt.sum(mt.linear(x, w) * (2048.0 if k == 0 else 1.0)).backward()
    np.testing.assert_array_equal(w.grad.numpy(), np.full((3, 4), 2056))


def test_activations_take_half_the_memory():
    mt.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.ReLU())))
    x = randn(500, 32)

    def kept(enabled):
        with ledger.record(memory=True) as book, mt.autocast("float16", enabled):
            y = model(x)
            held = book.live["activation"]
        return held, y
    (wide, _), (low, _) = kept(False), kept(True)
    assert wide == 5 * x.nbytes
    assert low == wide // 2 + sum(2 * p.size for p in model.parameters())       # with the weights as they were cast


# ---------------------------------------------------------------- the region itself

def test_regions_nest_end_and_decorate():
    x = randn(2, 2)

    @mt.autocast("float16")
    def product():
        return mt.matmul(x, x).dtype
    for _ in range(2):
        assert product() == np.float16 and state.autocast is None and not state.special
    with mt.autocast("float16"):
        with mt.autocast(enabled=False):
            assert mt.matmul(x, x).dtype == np.float32
        with pytest.raises(ValueError), mt.no_grad():
            mt.matmul(x, x[:1])
        mt.compile(mt.square)(x)
        assert mt.matmul(x, x).dtype == np.float16
    assert mt.matmul(x, x).dtype == np.float32 and state.autocast is None
    for wrong in ("float32", "int8", np.float64, "half"):
        with pytest.raises(ValueError, match=r"autocast: dtype .*; use 'float16'"), mt.autocast(wrong):
            pass
    with mt.autocast(np.float16):
        assert mt.matmul(x, x).dtype == np.float16


def test_backward_runs_in_forwards_precision_wherever_it_is_called():
    x, w, ct = randn(5, 40), leaf(40, 3), randn(5, 3)

    def passes(enabled):
        w.grad, y = None, mt.matmul(x, w) * 1.0
        halves, z = InputFirst(mt.matmul(x, w) * 1.0, w), mt.matmul(x, w) * 1.0
        pull = mt.vjp(lambda w: mt.matmul(x, w), w.numpy())[1]
        program = mt.linearize(lambda w: mt.matmul(x, w), w.numpy())[1]
        with mt.autocast("float16", enabled):
            y.backward(ct)
            first = w.grad.numpy().copy()
            w.grad = None
            z.backward(ct, create_graph=True)
            found = first, w.grad.numpy(), pull(ct)[0], halves.input(ct), program(w.numpy())
            assert mt.matmul(x, w).dtype == ("float16" if enabled else "float32")       # the region goes on
        return found
    for inside, outside in zip(passes(True), passes(False), strict=True):
        np.testing.assert_array_equal(inside, outside)


def test_transforms_inside_of_a_region():
    w, x = randn(4, 4), randn(3, 4)

    def f(w, x):
        return mt.sum(mt.tanh(mt.matmul(mt.relu(mt.matmul(x, w)), w)))
    u, v = randn(4, 4), randn(3, 4)
    exact = mt.grad(f, (0, 1))(w, x)
    with mt.autocast("float16"):
        found = mt.grad(f, (0, 1))(w, x)
        _, along = mt.jvp(f, (w, x), (u, v))
        _, program = mt.linearize(f, w, x)
        linear = program(u, v)
        curved = mt.grad(lambda w: mt.sum(mt.grad(f)(w, x) * u))(w)
    for a, b in zip(found, exact, strict=True):
        assert a.dtype == np.float32 and 0 < distance(a, b) < 4 * EPS
    inner = sum(float(np.sum(g * t)) for g, t in zip(exact, (u, v), strict=True))
    size = sum(np.linalg.norm(g) * np.linalg.norm(t) for g, t in zip(exact, (u, v), strict=True))
    assert along.dtype == linear.dtype == np.float32
    assert abs(along - inner) < 4 * EPS * size and abs(linear - inner) < 4 * EPS * size
    assert distance(curved, mt.grad(lambda w: mt.sum(mt.grad(f)(w, x) * u))(w)) < 8 * EPS
    np.testing.assert_array_equal(program(u, v), linear)        # its lines have their dtypes, inside and outside


def test_checkpoints_run_again_in_the_same_precision():
    w, x = leaf(6, 6), randn(3, 6)

    def block(x):
        return mt.tanh(mt.linear(mt.relu(mt.linear(x, w)), w))

    def run(f):
        w.grad = None
        with mt.autocast("float16"):
            loss = mt.sum(f(f(mt.tensor(x))))
        loss.backward()
        return w.grad.numpy().copy()
    np.testing.assert_array_equal(run(mt.checkpoint(block)), run(block))


def test_rules_by_hand_are_differentiated_again_in_the_same_precision():
    @mt.custom_vjp
    def cube(x):
        return x ** 3

    def backward(squares, ct):
        seen.append(squares.dtype)
        return 3 * squares.astype(np.float32) * ct,
    cube.defvjp(lambda x: (x ** 3, mt.matmul(x, x)), backward)
    seen = []
    x = mt.tensor(np.diag([1.1, 0.7]).astype(np.float32), requires_grad=True)
    with mt.autocast("float16"):
        y = mt.sum(cube(x))
    y.backward(create_graph=True)
    first, x.grad = x.grad, None
    mt.sum(first).backward()
    assert seen == [np.float16] and x.grad.dtype == np.float32      # forward was run again, for something to hang on
    np.testing.assert_allclose(np.diag(x.grad.numpy()), [6.6, 4.2], rtol=2 * EPS)


def test_a_compiled_function_has_a_graph_for_each_precision():
    mt.manual_seed(1)
    model, x = nn.Sequential(nn.Linear(6, 5), nn.GELU("tanh"), nn.LayerNorm(5), nn.Linear(5, 4)), randn(3, 6)
    compiled = mt.compile(model)

    def run(f):
        for p in model.parameters():
            p.grad = None
        y = f(x)
        nn.cross_entropy(y, np.arange(3)).backward()
        return y.numpy().copy(), *(p.grad.numpy().copy() for p in model.parameters())
    for dtype, enabled in (("float32", False), ("float16", True), ("float32", False), ("float16", True)):
        with mt.autocast("float16", enabled):
            found, expected = run(compiled), run(model)
        assert found[0].dtype == expected[0].dtype == dtype
        for a, b in zip(found, expected, strict=True):
            assert distance(a, b) < (2 * EPS if enabled else 1e-5)
    assert len(compiled.compiled.variants) == 2 and not compiled.breaks
    with mt.no_grad():      # and after a write it is the new weights that are cast
        model[3].bias[...] = 100 * np.ones(4, np.float32)
    with mt.autocast("float16"):
        assert compiled(x).numpy().min() > 90


def test_a_region_inside_of_a_compiled_function():
    w, x = leaf(4, 4), randn(3, 4)

    def f(x):
        with mt.autocast("float16"):
            return mt.sum(mt.tanh(mt.linear(x, w)))
    compiled = mt.compile(f)
    for _ in range(2):
        assert abs(compiled(x).item() - f(x).item()) < EPS * 12 and not compiled.breaks


# ---------------------------------------------------------------- on a GPU (the stand-in for CuPy)

def test_on_a_gpu_nothing_is_copied():
    mt.manual_seed(3)
    model, x, labels = nn.lenet(), randn(4, 784), np.arange(4)

    def passes(device):
        model.to(device).zero_grad()
        here = [mt.backend.to(a, device) for a in (x, labels)]
        transfers.clear()
        with mt.autocast("float16"):
            y = model(here[0])
            loss = nn.cross_entropy(y, here[1])
        loss.backward()
        copies = +transfers
        assert y.dtype == np.float16
        return [loss.cpu().numpy(), *(p.grad.cpu().numpy() for p in model.parameters())], copies
    expected, _ = passes("cpu")
    with installed():
        found, copies = passes("cuda")
        model.to("cpu")
    assert not copies
    for a, b in zip(found, expected, strict=True):      # the stand-in adds products up in float16
        assert distance(a, b) < 100 * EPS


def test_a_cuda_graph_for_each_precision_casts_anew_at_every_call(monkeypatch):
    with installed(cublas=fake_cublas.NAMES):
        monkeypatch.setattr(cublas, "load_library", fake_cublas.FakeCublas)
        model, x = nn.Linear(6, 4).to("cuda"), mt.backend.to(randn(3, 6), "cuda")

        @mt.cuda_graph
        def passes(x):
            model.zero_grad()
            y = model(x)
            (y * y).sum().backward()
            return y
        for k in range(8):
            with mt.autocast("float16", enabled=k % 2 == 0):
                model(x)        # what this casts is none of the graph's
                y = passes(x)
                expected = model(x)
                assert y.dtype == expected.dtype == ("float32" if k % 2 else "float16")
                np.testing.assert_array_equal(y.cpu().numpy(), expected.cpu().numpy())
                assert model.weight.grad.dtype == np.float32
            with mt.no_grad():
                model.weight[...] = model.weight + 1.0
        assert passes.graphs == 2
