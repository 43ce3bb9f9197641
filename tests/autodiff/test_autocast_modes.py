"""Autocast beside all that takes an op apart or repeats it: backward, transforms, checkpoints, compiled functions, GPUs
(the stand-in for CuPy)."""

import numpy as np

import minitorch_dist as mt
from minitorch_dist import nn
from minitorch_dist.autodiff.input_first import InputFirst
from minitorch_dist.kernels import cublas
from tests.device import fake_cublas
from tests.device.fake_cupy import installed, transfers

from .autocast_cases import EPS, distance, draws, each_dtype


@each_dtype
def test_backward_runs_in_forwards_precision_wherever_it_is_called(dtype):
    randn, leaf = draws()
    x, w, ct = randn(5, 40), leaf(40, 3), randn(5, 3)

    def passes(enabled):
        w.grad, y = None, mt.matmul(x, w) * 1.0
        halves, z = InputFirst(mt.matmul(x, w) * 1.0, w), mt.matmul(x, w) * 1.0
        pull = mt.vjp(lambda w: mt.matmul(x, w), w.numpy())[1]
        program = mt.linearize(lambda w: mt.matmul(x, w), w.numpy())[1]
        with mt.autocast(dtype, enabled):
            y.backward(ct)
            first = w.grad.numpy().copy()
            w.grad = None
            z.backward(ct, create_graph=True)
            found = first, w.grad.numpy(), pull(ct)[0], halves.input(ct), program(w.numpy())
            assert mt.matmul(x, w).dtype == (dtype if enabled else "float32")       # the region goes on
        return found
    for inside, outside in zip(passes(True), passes(False), strict=True):
        np.testing.assert_array_equal(inside, outside)


@each_dtype
def test_transforms_inside_of_a_region(dtype):
    randn, _ = draws()
    w, x = randn(4, 4), randn(3, 4)

    def f(w, x):
        return mt.sum(mt.tanh(mt.matmul(mt.relu(mt.matmul(x, w)), w)))
    u, v = randn(4, 4), randn(3, 4)
    exact = mt.grad(f, (0, 1))(w, x)
    with mt.autocast(dtype):
        found = mt.grad(f, (0, 1))(w, x)
        _, along = mt.jvp(f, (w, x), (u, v))
        _, program = mt.linearize(f, w, x)
        linear = program(u, v)
        curved = mt.grad(lambda w: mt.sum(mt.grad(f)(w, x) * u))(w)
    for a, b in zip(found, exact, strict=True):
        assert a.dtype == np.float32 and 0 < distance(a, b) < 4 * EPS[dtype]
    inner = sum(float(np.sum(g * t)) for g, t in zip(exact, (u, v), strict=True))
    size = sum(np.linalg.norm(g) * np.linalg.norm(t) for g, t in zip(exact, (u, v), strict=True))
    assert along.dtype == linear.dtype == np.float32
    assert abs(along - inner) < 4 * EPS[dtype] * size and abs(linear - inner) < 4 * EPS[dtype] * size
    assert distance(curved, mt.grad(lambda w: mt.sum(mt.grad(f)(w, x) * u))(w)) < 8 * EPS[dtype]
    np.testing.assert_array_equal(program(u, v), linear)        # its lines have their dtypes, inside and outside


@each_dtype
def test_checkpoints_run_again_in_the_same_precision(dtype):
    randn, leaf = draws()
    w, x = leaf(6, 6), randn(3, 6)

    def block(x):
        return mt.tanh(mt.linear(mt.relu(mt.linear(x, w)), w))

    def run(f):
        w.grad = None
        with mt.autocast(dtype):
            loss = mt.sum(f(f(mt.tensor(x))))
        loss.backward()
        return w.grad.numpy().copy()
    np.testing.assert_array_equal(run(mt.checkpoint(block)), run(block))


@each_dtype
def test_rules_by_hand_are_differentiated_again_in_the_same_precision(dtype):
    @mt.custom_vjp
    def cube(x):
        return x ** 3

    def backward(squares, ct):
        seen.append(squares.dtype)
        return 3 * squares.astype(np.float32) * ct,
    cube.defvjp(lambda x: (x ** 3, mt.matmul(x, x)), backward)
    seen = []
    x = mt.tensor(np.diag([1.1, 0.7]).astype(np.float32), requires_grad=True)
    with mt.autocast(dtype):
        y = mt.sum(cube(x))
    y.backward(create_graph=True)
    first, x.grad = x.grad, None
    mt.sum(first).backward()
    assert seen == [dtype] and x.grad.dtype == np.float32      # forward was run again, for something to hang on
    np.testing.assert_allclose(np.diag(x.grad.numpy()), [6.6, 4.2], rtol=2 * EPS[dtype])


@each_dtype
def test_a_compiled_function_has_a_graph_for_each_precision(dtype):
    randn, _ = draws()
    mt.manual_seed(1)
    model, x = nn.Sequential(nn.Linear(6, 5), nn.GELU("tanh"), nn.LayerNorm(5), nn.Linear(5, 4)), randn(3, 6)
    compiled = mt.compile(model)

    def run(f):
        for p in model.parameters():
            p.grad = None
        y = f(x)
        nn.cross_entropy(y, np.arange(3)).backward()
        return y.numpy().copy(), *(p.grad.numpy().copy() for p in model.parameters())
    for enabled in (False, True, False, True):
        with mt.autocast(dtype, enabled):
            found, expected = run(compiled), run(model)
        assert found[0].dtype == expected[0].dtype == (dtype if enabled else "float32")
        for a, b in zip(found, expected, strict=True):
            assert distance(a, b) < (2 * EPS[dtype] if enabled else 1e-5)
    assert len(compiled.compiled.variants) == 2 and not compiled.breaks
    with mt.no_grad():      # and after a write it is the new weights that are cast
        model[3].bias[...] = 100 * np.ones(4, np.float32)
    with mt.autocast(dtype):
        assert compiled(x).numpy().min() > 90


@each_dtype
def test_a_region_inside_of_a_compiled_function(dtype):
    randn, leaf = draws()
    w, x = leaf(4, 4), randn(3, 4)

    def f(x):
        with mt.autocast(dtype):
            return mt.sum(mt.tanh(mt.linear(x, w)))
    compiled = mt.compile(f)
    for _ in range(2):
        assert abs(compiled(x).item() - f(x).item()) < EPS[dtype] * 12 and not compiled.breaks


@each_dtype
def test_numpys_own_operators_know_no_autocast_when_compiled_either(dtype):
    def f(x):
        return x @ x, x.sum(), np.sum(x, 0), x ** 3, mt.matmul(x, x), x @ mt.Tensor(x)
    compiled = mt.compile(f)
    for given in ("float32", "float16"):
        with mt.autocast(dtype):
            x = np.ones((2, 2), given)
            found, expected = ([y.dtype for y in g(x)] for g in (compiled, f))
        assert found == expected == [given] * 4 + [dtype] * 2 and not compiled.breaks


# ---------------------------------------------------------------- on a GPU (the stand-in for CuPy)

@each_dtype
def test_on_a_gpu_nothing_is_copied(dtype):
    randn, _ = draws()
    mt.manual_seed(3)
    model, x, labels = nn.lenet(), randn(4, 784), np.arange(4)

    def passes(device):
        model.to(device).zero_grad()
        here = [mt.backend.to(a, device) for a in (x, labels)]
        transfers.clear()
        with mt.autocast(dtype):
            y = model(here[0])
            loss = nn.cross_entropy(y, here[1])
        loss.backward()
        copies = +transfers
        assert y.dtype == dtype
        return [loss.cpu().numpy(), *(p.grad.cpu().numpy() for p in model.parameters())], copies
    expected, _ = passes("cpu")
    with installed():
        found, copies = passes("cuda")
        model.to("cpu")
    assert not copies
    for a, b in zip(found, expected, strict=True):      # the stand-in adds products up in float16
        assert distance(a, b) < 100 * EPS[dtype]


@each_dtype
def test_a_cuda_graph_for_each_precision_casts_anew_at_every_call(monkeypatch, dtype):
    randn, _ = draws()
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
            with mt.autocast(dtype, enabled=k % 2 == 0):
                model(x)        # what this casts is none of the graph's
                y = passes(x)
                expected = model(x)
                assert y.dtype == expected.dtype == ("float32" if k % 2 else dtype)
                np.testing.assert_array_equal(y.cpu().numpy(), expected.cpu().numpy())
                assert model.weight.grad.dtype == np.float32
            with mt.no_grad():
                model.weight[...] = model.weight + 1.0
        assert passes.graphs == 2


def test_what_cupy_has_not_in_bfloat16_is_computed_in_float32():
    """The stand-in refuses what CuPy 14.2 does: products of many matrices, sums of products, sorting, running sums."""
    randn, _ = draws()
    x, y = (randn(2, 3, 4, dtype="bfloat16") for _ in range(2))
    functions = [lambda x, y: mt.matmul(x, y.swapaxes(1, 2)), lambda x, y: mt.einsum("bij,bkj->ik", x, y),
                 lambda x, y: mt.cumsum(x, 1), lambda x, y: mt.sort(x + y, 1), lambda x, y: mt.topk(x, 2)[0],
                 lambda x, y: x[np.array([1, 0, 1])] * 2.0, lambda x, y: mt.linear(x, y[0])]

    def run(device):
        found = []
        for f in functions:
            leaves = [mt.tensor(a, requires_grad=True, device=device) for a in (x, y)]
            value = f(*leaves)
            mt.sum(value * value).backward()
            found += [value.cpu().numpy(), *(leaf.grad.cpu().numpy() for leaf in leaves if leaf.grad is not None)]
        return found
    expected = run("cpu")
    with installed():
        found = run("cuda")
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype == "bfloat16"
        np.testing.assert_array_equal(a, b)
