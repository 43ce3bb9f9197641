"""The whole op table on arrays of a GPU (the stand-in): the same bits as on NumPy's, and nothing is copied unasked."""

from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import backend
from minitorch_dist.autodiff.primitive import lower
from minitorch_dist.autodiff.tree import flatten

from ..autodiff import samples
from .fake_cupy import installed, ndarray, transfers

CONSTANTS = [name for name, value in vars(samples).items() if isinstance(value, np.ndarray)]
MOVING = [s for s in samples.SAMPLES if s.covers != "to_device"]        # that one names the devices itself
by_id = pytest.mark.parametrize("sample", MOVING, ids=lambda s: s.id)

# Copies that a sample makes each time it runs: a list as an index must go up; a mask's result has a shape that only the
# GPU knows, so that CuPy waits for it; so do products of as many rows as queries have chosen.
COPIES = {"take": {"up": 1}, "take_along_axis": {"implicit": 1}, "getitem-mask": {"down": 1},
          "block_attention": {"down": 1}, "block_attention-own blocks": {"down": 1},
          "greatest_block_scores": {"down": 1}}


@contextmanager
def constants_on_gpu():
    """Inside, the arrays that samples take from their module are on the GPU."""
    with pytest.MonkeyPatch.context() as patch:
        for name in CONSTANTS:
            patch.setattr(samples, name, backend.to(getattr(samples, name), "cuda"))
        yield


@pytest.fixture(autouse=True)
def gpu():
    with installed() as cupy:
        yield cupy


def on_gpu(function, *arguments):
    """function(*arguments) with all arrays, the samples' constants too, on the GPU; its results on the host, and the
    copies that it made."""
    with constants_on_gpu():
        moved = [backend.to(a, "cuda") for a in arguments]
        transfers.clear()
        results = [lower(r) for r in flatten(function(*moved))[0]]
        copies = +transfers
    assert all(type(r) is ndarray for r in results)
    return [backend.to(r, "cpu") for r in results], copies


def check(sample, function, *arguments):
    """The same bits on both devices, and no copies but for the sample's own, or the op's of that name."""
    expected = [np.asarray(lower(r)) for r in flatten(function(*arguments))[0]]
    found, copies = on_gpu(function, *arguments)
    for f, e in zip(found, expected, strict=True):
        assert f.shape == e.shape and f.dtype == e.dtype
        np.testing.assert_array_equal(f, e)
    allowed = Counter(COPIES.get(getattr(sample, "id", sample), {}))
    assert set(copies) == set(allowed), copies


def random_like(function, *args):
    rng = np.random.default_rng(1)
    return [rng.standard_normal(np.shape(lower(y))) for y in flatten(function(*args))[0]]


@by_id
def test_backward(sample):
    u, = random_like(sample.function, *map(mt.tensor, sample.args))

    def gradients(u, *args):
        leaves = [mt.tensor(a, requires_grad=True) for a in args]
        y = sample.function(*leaves)
        y.backward(mt.tensor(u))
        return [y, *(leaf.grad for leaf in leaves)]
    check(sample, gradients, u, *sample.args)


@by_id
def test_backward_of_backward_on_the_tape(sample):
    u, = random_like(sample.function, *map(mt.tensor, sample.args))

    def second(u, *args):
        leaves = [mt.tensor(a, requires_grad=True) for a in args]
        (sample.function(*leaves) * u).sum().backward(create_graph=True)
        firsts = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        total = sum((g * g).sum() for g in firsts)
        if total.requires_grad:
            total.backward()
        return [*firsts, *(leaf.grad for leaf in leaves if leaf.grad is not None)]
    check(sample, second, u, *sample.args)


@by_id
def test_forward_mode_and_second_derivatives(sample):
    directions = random_like(lambda *xs: list(xs), *sample.args)
    u, = random_like(sample.function, *map(mt.tensor, sample.args))
    n = len(sample.args)

    def both(u, *given):
        args, directions = given[:n], given[n:]

        def gradient(*xs):
            return mt.vjp(sample.function, *xs)[1](u)
        return mt.jvp(gradient, args, directions), mt.vjp(gradient, *args)[1](directions)
    check(sample, both, u, *sample.args, *directions)


@by_id
def test_linear_programs(sample):
    directions = random_like(lambda *xs: list(xs), *sample.args)
    u, = random_like(sample.function, *map(mt.tensor, sample.args))
    n = len(sample.args)

    def program(u, *given):
        y, linear = mt.linearize(sample.function, *given[:n])
        return y, linear(*given[n:]), linear.transpose(u), linear.T(u)
    # Whether an added constant is 0 is asked for on the host, while the program is made.
    expected = [np.asarray(lower(r)) for r in flatten(program(u, *sample.args, *directions))[0]]
    for f, e in zip(on_gpu(program, u, *sample.args, *directions)[0], expected, strict=True):
        np.testing.assert_array_equal(f, e)


@pytest.mark.parametrize("name", sorted(samples.CONSTANT))
def test_ops_without_a_derivative(name):
    function = samples.CONSTANT[name]
    arguments = [np.array([[1.5, -0.5, 0.0], [2.0, -3.0, 0.5]]), np.array([[1.0, -0.5, 2.0]])]
    arguments = [a > 0 for a in arguments] if name.startswith("logical") else arguments
    two = len(mt.OPS[name].inputs) == 2
    check(name, lambda x, y: [function(mt.tensor(x), mt.tensor(y)) if two else function(mt.tensor(x))],
          *arguments)


def test_what_else_ops_do():
    """Corners that the samples leave out: each a function of two arrays."""
    def everything(x, labels):
        t = mt.tensor(x)
        yield mt.one_hot(labels, 5)
        yield mt.embedding(labels, t)
        yield mt.argsort(t, 0)
        yield from mt.topk(t, 2)
        yield 2.0 ** t
        yield mt.where(True, t, 0.0)
        yield t.gather(1, (t > 0).astype(np.int64))
        yield t.masked_fill(t > 0, -1.0)
        yield mt.scaled_dot_product_attention(t[None, None, :0], t[None, None], t[None, None], is_causal=True)
        yield mt.scaled_dot_product_attention(t[None, None], t[None, None, :0], t[None, None, :0])
        yield t.detach().at[labels].set(mt.ones_like(t)) if len(x) == 4 else t
        yield t.view(-1)[3]
        yield t.std(0)
        yield mt.eye(3, device=t.device)
        yield mt.full((2, 3), 7, device=t.device)
        yield mt.zeros_like(t)
        yield mt.outer(t[0], t[1]).T
        yield mt.hessian(lambda z: (z ** 3).sum())(x[0])
        yield mt.jacrev(lambda z: z.sum(0) * z[1])(x)
        yield mt.hvp(lambda z: mt.softmax(z).sum() + (z * z * z).sum(), x, x)
        yield mt.stop_gradient(t)
        yield from mt.linearize(lambda z: (z * 2, mt.ones_like(z)), x)[1](x)     # the second doesn't depend on x
        yield mt.checkpoint(lambda z: mt.dropout(z * 2, 0.5) * z)(mt.tensor(x, requires_grad=True))
    rng = np.random.default_rng(3)
    x, labels = rng.standard_normal((4, 3)), np.array([2, 0, 3, 1])
    mt.manual_seed(0)
    expected = [np.asarray(lower(y)) for y in everything(x, labels)]
    mt.manual_seed(0)
    found, _ = on_gpu(lambda *given: list(everything(*given)), x, labels)
    for f, e in zip(found, expected, strict=True):
        np.testing.assert_array_equal(f, e)


def test_custom_rules():
    @mt.custom_vjp
    def double(x):
        return x * 2, x + 1
    double.defvjp(lambda x: ((x * 2, x + 1), x), lambda x, cts: (cts[0] * 3 + cts[1] * 0,))

    @mt.custom_jvp
    def cube(x):
        return x ** 3
    cube.defjvp(lambda primals, tangents: (primals[0] ** 3, tangents[0] * (3 * primals[0] * primals[0])))

    def gradients(x):
        a, b = (mt.tensor(x, requires_grad=True) for _ in range(2))
        double(a)[0].sum().backward()       # the second output gets no cotangent: zeros are made where it lives
        cube(b).sum().backward()
        return a.grad, b.grad, mt.jvp(cube, (x,), (x,))
    check(samples.SAMPLES[0], gradients, np.array([1.0, -2.0, 0.5]))
