"""The rules at the top of ops/__init__.py, a test for each sentence."""

import math

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import nn
from minitorch_dist.autodiff.primitive import lower

rng = np.random.default_rng(9)


def leaf(*values, dtype=np.float64):
    return mt.tensor(np.array(values, dtype), requires_grad=True)


@pytest.mark.parametrize("f", [
    lambda x: x * 2.0, lambda x: 1 / x, lambda x: x ** 2, lambda x: 2.0 ** x, lambda x: x - 1, lambda x: x % 3,
    lambda x: mt.clip(x, 0.1, 5), lambda x: mt.pad(x, 1, constant_values=2.5), lambda x: mt.maximum(x, 0),
    lambda x: mt.where(x > 1, x, 0.0), lambda x: mt.dropout(x, 0.5), lambda x: mt.mean(x), lambda x: mt.var(x)])
def test_python_scalars_are_weak(f):
    x = leaf(0.5, 1.5, 2.5, dtype=np.float32)
    y = f(x)
    assert y.dtype == np.float32
    y.sum().backward()
    assert x.grad.dtype == np.float32


@pytest.mark.parametrize("norm", [
    lambda x, eps: mt.layer_norm(x, 3, eps=eps), lambda x, eps: mt.rms_norm(x, 3, eps=eps),
    lambda x, eps: mt.batch_norm(x, eps=eps)[0]])
def test_numpys_eps_is_weak_too(norm):
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    for f in (norm, lambda x, eps: mt.jvp(lambda x: norm(x, eps), (x,), (x,))[1]):
        y = f(x, np.float64(1e-5))
        assert y.dtype == np.float32 and np.array_equal(y, f(x, 1e-5))


def test_mixed_dtypes_promote_and_each_gradient_keeps_its_own():
    x, y = leaf(1.0, 2.0, dtype=np.float32), leaf(3.0, 4.0)
    z = mt.concatenate([x, y]) * mt.stack([x, y])[:, :1].sum() + mt.einsum("i,i->", x, y)
    assert z.dtype == np.float64
    z.sum().backward()
    assert x.grad.dtype == np.float32 and y.grad.dtype == np.float64


def test_bool_and_int_get_no_gradient():
    with pytest.raises(TypeError, match="only floating"):
        mt.tensor([1, 2], requires_grad=True)
    with pytest.raises(TypeError, match="only floating"):
        mt.grad(mt.sum)(np.array([True]))
    x = leaf(1.0, 2.0)
    for constant in (x > 1, x.argmax(), x.floor(), mt.sign(x), mt.isnan(x), x.any(), ~(x > 1), (x > 1) & (x < 3),
                     x.astype(np.int64), mt.argsort(x), x.topk(1)[1], mt.one_hot(mt.tensor([0, 1]), 2), x // 1):
        assert isinstance(constant, mt.Tensor) and not constant.requires_grad
    with pytest.raises(TypeError, match="bools"):
        x & x
    with pytest.raises(TypeError, match="bools"):
        np.array([1, 2]) & (x > 1)
    mask = np.array([False, True])
    for found, expected in ((mask & (x > 0), mask), (mask | (x > 1), mask), (mask ^ (x > 0), ~mask), (+x, x)):
        assert isinstance(found, mt.Tensor) and found.tolist() == expected.tolist()


def test_ties_share_evenly_and_places_take_the_first():
    a = np.array([1.0, 3.0, 3.0])
    for f in (mt.max, lambda x: mt.max_pool1d(x[None, None], 3).sum(), lambda x: -mt.min(-x)):
        np.testing.assert_array_equal(mt.grad(f)(a), [0, 0.5, 0.5])
    np.testing.assert_array_equal(mt.grad(lambda x: mt.sum(mt.clip(x, 1.0, 2.0)))(a), [0.5, 0, 0])
    assert mt.argmax(a) == 1 and list(mt.topk(a, 1)[1]) == [1] and list(mt.topk(-a, 1, largest=False)[1]) == [1]
    np.testing.assert_array_equal(mt.grad(lambda x: mt.sum(mt.topk(x, 1)[0]))(a), [0, 1, 0])


@pytest.mark.parametrize("values", [
    np.array([3, 0, 250, 7, 250], np.uint8), np.array([5, -128, 127, -3], np.int8), np.array([False, True, True]),
    np.array([2**63 - 1, -2**63, 0]), np.array([1.0, np.nan, -np.inf, 3.0, np.inf], np.float16)],
    ids=lambda values: values.dtype.name)
def test_the_largest_of_any_dtype(values):
    """As plain Python sorts them, NaN before all numbers."""
    order = sorted(range(len(values)), key=lambda i: (values[i] == values[i], -float(values[i]), i))
    for k in range(len(values) + 1):
        found, places = mt.topk(mt.tensor(values), k)
        assert places.tolist() == order[:k] and found.dtype == values.dtype
        np.testing.assert_array_equal(found.numpy(), values[order[:k]])
    twice, both = np.stack([values, values[::-1]], 1), mt.topk(np.stack([values, values[::-1]], 1), 2, 0)
    np.testing.assert_array_equal(both[0][:, 0], values[order[:2]])
    np.testing.assert_array_equal(twice[both[1][:, 1], 1], values[order[:2]])


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int64, bool])
def test_fused_ops_take_whole_numbers_as_float64(dtype):
    x, y = np.array([[3, 1, 0], [2, 0, 1]], dtype), np.array([[1, 0, 4], [0, 3, 1]], dtype)
    labels = np.array([1, 0])
    for f in (lambda x, y: mt.gelu(x, "tanh"), lambda x, y: mt.gelu(x), mt.swiglu, lambda x, y: mt.rms_norm(x, 3),
              lambda x, y: mt.linear_cross_entropy(x, y, labels), lambda x, y: nn.mse_loss(x, y, "none"),
              lambda x, y: mt.sigmoid(x), lambda x, y: nn.LeakyReLU()(x),       # -x, without signs, would be large
              lambda x, y: nn.binary_cross_entropy_with_logits(x, np.full((2, 3), 0.5), "none")):
        found, expected = (f(mt.tensor(x.astype(t)), mt.tensor(y.astype(t))) for t in (dtype, np.float64))
        assert found.dtype == np.float64
        np.testing.assert_array_equal(found.numpy(), expected.numpy())
    assert nn.mse_loss(mt.tensor(np.array([200], np.uint8)), mt.tensor(np.array([0], np.uint8))).item() == 40_000
    assert nn.mse_loss(mt.tensor([1.0]), mt.tensor(np.array([3], np.uint8))).dtype == np.float32


@pytest.mark.parametrize("dtype, tolerance", [(np.float16, 2e-3), (mt.bfloat16, 2e-2)], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("shift", [0, 1], ids=["rms_norm", "layer_norm"])
def test_definitions_of_16_bits_are_computed_in_float32(shift, dtype, tolerance):
    """Squares beyond float16's numbers, and a variance of 0, of which the slope has 1e-5 to the power -1.5: in forward
    mode, and where backward is differentiated. Expected by central differences in float64."""
    x, v = np.array([[300, 400, 304], [2, 2, 2], [1, -2, 4]]), np.array([[64, -32, 16], [1, 2, -2], [1, 3, 0.5]])
    norm = (lambda x: mt.layer_norm(x, 3)) if shift else (lambda x: mt.rms_norm(x, 3, eps=1e-5))

    def exact(x):
        x = x - shift * x.mean(1, keepdims=True)
        return x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-5)
    value, slope = mt.jvp(norm, (x.astype(dtype),), (v.astype(dtype),))
    _, twice = mt.jvp(lambda x: mt.vjp(norm, x)[1](v.astype(dtype))[0], (x.astype(dtype),), (v.astype(dtype),))
    h = 1e-5
    wanted = (exact(x + h * v) - exact(x - h * v)) / (2 * h)
    assert value.dtype == slope.dtype == twice.dtype == dtype
    for got, expected in ((value, exact(x)), (slope, wanted)):
        scale = np.abs(expected).max(1, keepdims=True) + 1e-3
        np.testing.assert_allclose(got.astype(np.float64) / scale, expected / scale, atol=tolerance)
    assert np.isfinite(twice.astype(np.float64)).all()


@pytest.mark.parametrize("dtype, tolerance", [(np.float16, 1e-3), (mt.bfloat16, 8e-3)], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("scale, shift", [(1000, 0), (1, 200)], ids=["a variance of 10^6", "a mean of 200"])
def test_batch_norm_keeps_the_statistics_of_16_bits_in_float32(scale, shift, dtype, tolerance):
    """Beyond float16's range, and where the mean's rounding is as large as what is left without it: values, gradients
    and forward mode are float64's."""
    rng = np.random.default_rng(0)
    x, *weights = ((rng.standard_normal(shape) * by + more).astype(dtype) for shape, by, more in (
        ((40, 3), scale, shift), ((3,), 1, 0), ((3,), 1, 0)))
    v = rng.standard_normal((40, 3)).astype(dtype)
    ends = []
    for kind in (dtype, np.float64):
        args = [a.astype(kind) for a in (x, *weights)]
        y, pull = mt.vjp(lambda *args: mt.batch_norm(*args)[0], *args)
        slope = mt.jvp(lambda x, args=args: mt.batch_norm(x, *args[1:])[0], args[:1], (v.astype(kind),))[1]
        ends.append([y, *pull(v.astype(kind)), slope])
    for got, exact in zip(*ends, strict=True):
        assert got.dtype == dtype and np.linalg.norm(got - exact) < tolerance * np.linalg.norm(exact)


@pytest.mark.parametrize("form", ["none", "tanh"])
def test_linear_gelu_of_float16_beyond_the_square_s_range_in_forward_mode(form):
    """Of 300, whose square is 90,000, it is x itself, and of -300 0, in all derivatives."""
    x, w, ones = np.array([[300.0], [-300.0]], np.float16), np.ones((1, 1), np.float16), np.ones((2, 1), np.float16)

    def f(x):
        return mt.linear_gelu(x, w, np.zeros(1, np.float16), form)
    value, slope = mt.jvp(f, (x,), (ones,))
    twice = mt.jvp(lambda x: mt.vjp(f, x)[1](ones)[0], (x,), (ones,))[1]
    assert value.ravel().tolist() == [300, 0] and slope.ravel().tolist() == [1, 0] and not twice.any()


def test_kinks():
    zero = np.zeros(1)
    for f in (mt.relu, mt.absolute, mt.floor, mt.sign):
        assert mt.grad(lambda x, f=f: mt.sum(f(x) + 0 * x))(zero)[0] == 0
    assert mt.grad(lambda x: mt.sum(x % 1.0))(np.array([2.0]))[0] == 1


@pytest.mark.parametrize("as_array", [False, True])
@pytest.mark.parametrize("k", range(5))
def test_whole_powers_of_zero(k, as_array):
    """The n-th derivative of x**k at 0 is k! where n = k, and 0 elsewhere."""
    f = lambda x: mt.sum(x ** (np.array([float(k)]) if as_array else k))    # noqa: E731
    for n in range(1, 5):
        f = mt.grad(lambda x, f=f: mt.sum(f(x)))
        assert f(np.zeros(1))[0] == (math.factorial(k) if n == k else 0)


def test_the_slope_of_a_power_depends_on_its_exponent_where_that_is_0():
    both = lambda y: mt.grad(lambda x: mt.sum(x ** y))(np.array([2.0, 4.0]))      # noqa: E731
    np.testing.assert_allclose(mt.jvp(both, (np.zeros(2),), (np.ones(2),))[1], [0.5, 0.25])   # y·x^(y-1)


def test_prod_with_zeros():
    x = np.array([[2.0, 3.0, 4.0], [2.0, 0.0, 4.0], [0.0, 5.0, 0.0]])
    np.testing.assert_array_equal(mt.grad(lambda x: mt.sum(mt.prod(x, 1)))(x), [[12, 8, 6], [0, 8, 0], [0, 0, 0]])
    hessian = mt.hessian(lambda x: mt.prod(x))(x[2])
    np.testing.assert_array_equal(hessian, [[0, 0, 5], [0, 0, 0], [5, 0, 0]])
    np.testing.assert_array_equal(mt.grad(lambda x: mt.prod(x))(np.array([1e-200, 1e-200, 1e300])),
                                  [1e-200 * 1e300, 1e-200 * 1e300, 1e-200 * 1e-200])


def test_empty_arrays():
    x = leaf().reshape(0, 3)
    assert mt.sum(x).item() == 0 and mt.prod(x).item() == 1 and mt.cumsum(x, 0).shape == (0, 3)
    assert mt.any(x).item() is False and mt.all(x).item() is True
    assert mt.einsum("ij,kj->ik", x, np.ones((2, 3))).shape == (0, 2)
    assert mt.softmax(x).shape == mt.layer_norm(x, 3).shape == mt.gelu(x).shape == mt.flip(x).shape == (0, 3)
    assert mt.max(x, 1).shape == (0,) and mt.stack([x, x]).shape == (2, 0, 3)
    assert mt.max_pool2d(np.ones((0, 2, 4, 4)), 2).shape == (0, 2, 2, 2)
    q = np.ones((0, 2, 3, 4))
    assert mt.vjp(mt.scaled_dot_product_attention, q, q, q)[1](q)[0].shape == q.shape
    for f in (mt.max, mt.argmax, mt.argmin):
        with pytest.raises(ValueError):
            f(x, 0)
    y = leaf()
    (mt.sum(mt.exp(y)) + mt.prod(y)).backward()
    assert y.grad.shape == (0,)


def test_sums_of_exponentials_over_nothing_and_of_infinities():
    """scipy.special.logsumexp's values; softmax along an empty axis is empty."""
    inf, empty = np.inf, np.zeros((2, 0))
    with np.errstate(divide="ignore"):
        assert (mt.logsumexp(empty, 1) == -inf).all() and mt.logsumexp(np.array([-inf, -inf])) == -inf
        for f in (mt.softmax, mt.log_softmax):
            assert f(empty).shape == mt.grad(lambda x, f=f: mt.sum(f(x)))(empty).shape == (2, 0)
    assert mt.logsumexp(np.array([inf, 1.0])) == inf and np.isnan(mt.logsumexp(np.array([np.nan, 1.0])))
    np.testing.assert_allclose(mt.logsumexp(np.array([-inf, 800.0, 801.0])), 801 + math.log(1 + math.exp(-1)))


def test_what_a_reduction_makes_of_integers_and_of_too_few():
    for kind in (bool, np.int8, np.uint8, np.int32):
        x = np.array([[1, 0, 1], [1, 1, 1]]).astype(kind)
        for f, theirs in ((mt.sum, np.sum), (mt.cumsum, np.cumsum)):
            assert f(x, 1).dtype == theirs(x, 1).dtype and (f(x, 1) == theirs(x, 1)).all()
    with np.errstate(all="ignore"):     # as NumPy's
        assert np.isnan(mt.var(np.zeros(0), correction=1)) and np.isnan(mt.var(np.ones(1), correction=2))
        assert mt.var(np.arange(3.0), correction=5) == np.inf


@pytest.mark.parametrize("kind", [bool, np.int8, np.uint8, np.int64])
@pytest.mark.parametrize("raw", [True, False])
def test_integers_in_fused_ops_are_their_floats(kind, raw):
    x = rng.integers(0, 2 if kind is bool else 5, (2, 3, 6, 4)).astype(kind)
    flat, labels = x.reshape(-1, 4), rng.integers(0, 4, 36)
    for f, a in ((mt.softmax, x), (mt.log_softmax, x), (lambda a: mt.softmax_cross_entropy(a, labels), flat),
                 (lambda a: mt.avg_pool2d(a, 3, padding=1), x), (lambda a: mt.avg_pool1d(a, 2), x[0]),
                 (lambda a: mt.scaled_dot_product_attention(a, a[:, :1], a[:, :1], is_causal=True), x)):
        found, wanted = lower(f(a if raw else mt.tensor(a))), f(a.astype(float))
        assert found.dtype == wanted.dtype == np.float64
        np.testing.assert_array_equal(found, wanted)
    for padding in (0, 1):
        for f in (mt.max_pool2d, mt.compile(mt.max_pool2d)):
            found = lower(f((x if raw else mt.tensor(x)) * kind(1), 3, padding=padding))
            wanted = mt.max_pool2d(x.astype(float), 3, padding=padding)
            assert found.dtype == kind
            np.testing.assert_array_equal(found, wanted)
    if kind in (np.int8, np.int64):     # less than the zeros around
        np.testing.assert_array_equal(lower(mt.max_pool1d((x[0] - 7).astype(kind), 3, padding=1)),
                                      mt.max_pool1d(x[0] - 7.0, 3, padding=1))


def test_chunks_of_an_empty_axis():
    """As many as asked for, as in torch: SwiGLU takes two of them."""
    assert [c.shape for c in mt.chunk(np.zeros((2, 0)), 3, -1)] == [(2, 0)] * 3
    assert [c.shape for c in mt.chunk(np.zeros((2, 5)), 4, 1)] == [(2, 2), (2, 2), (2, 1)]


def test_scalars_and_axes_of_one():
    x = leaf(2.0).reshape(())
    for f in (mt.sum, mt.prod, mt.max, mt.cumsum, mt.ravel, mt.erf, mt.gelu, lambda x: mt.stack([x, x]),
              lambda x: mt.einsum("->", x), lambda x: mt.expand_dims(x, 0), lambda x: mt.pad(x, 1)):
        assert mt.grad(lambda z, f=f: mt.sum(f(z) * 2.0))(x.numpy()) != 0
    for f in (mt.sum, mt.max, mt.mean, mt.softmax, mt.log_softmax, mt.logsumexp):       # the axes that NumPy allows
        mt.check_grads(lambda z, f=f: f(z, 0) + f(z, -1), (x.numpy(),))
    one = rng.standard_normal((1, 3, 1))
    for f in (lambda x: mt.softmax(x, 1), lambda x: mt.prod(x, 2), lambda x: mt.layer_norm(x, (3, 1)),
              lambda x: mt.conv1d(x, np.ones((2, 3, 1))), mt.squeeze, lambda x: mt.tile(x, (2, 1, 2))):
        mt.check_grads(f, (one,))


@pytest.mark.parametrize("dtype, bound", [(np.float64, 5e-16), (np.float32, 3e-7), (np.float16, 5e-4)])
def test_erf_is_as_exact_as_stated(dtype, bound):
    x = np.concatenate([np.linspace(-7, 7, 20001), np.logspace(-30, 0, 500), [np.inf, -np.inf]]).astype(dtype)
    if dtype == np.float16:
        x = x[(np.abs(x) >= np.finfo(dtype).tiny)]      # what is smaller has no 11 bits
    exact = np.array([math.erf(v) for v in x])
    error = np.abs(mt.erf(x) - exact)
    assert (error <= bound * np.abs(exact)).all(), (error / np.abs(exact)).max()
    assert mt.erf(x).dtype == dtype and np.isnan(mt.erf(np.array([np.nan])))[0]


@pytest.mark.parametrize("y", [3, 4, 5, -2, -3, 3.0, -7.0, 2, 1, 0, -1, 100, 0.5, np.inf, -np.inf, np.nan, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.int32])
def test_powers_are_numpys(dtype, y):
    """Within a unit in the last place; of zeros, infinities and NaN the same ones, with their signs."""
    x = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, *rng.standard_normal(100) * 3], np.float64)
    x = x.astype(dtype) if dtype != np.int32 else np.arange(-4, 5, dtype=dtype)
    with np.errstate(all="ignore"):
        if dtype == np.int32 and y.__class__ is int and y < 0:      # as NumPy says it
            with pytest.raises(ValueError, match="negative integer powers"):
                mt.power(x, y)
            return
        found, right = mt.power(x, y), np.power(x, y)
    assert found.dtype == right.dtype
    bound = 2 * np.finfo(right.dtype).eps if right.dtype.kind == "f" else 0
    np.testing.assert_allclose(found, right, rtol=bound, atol=0)
    signed = ~np.isnan(right)
    assert (np.signbit(found) == np.signbit(right))[signed].all()


def test_random_numbers_follow_their_stream():
    draw = lambda: mt.random.normal(mt.backend.stream("test", 1), (1000,), mean=3.0)    # noqa: E731
    np.testing.assert_array_equal(draw().numpy(), draw().numpy())
    assert draw().dtype == np.float32 and abs(draw().numpy().mean() - 3) < 0.2 and not draw().requires_grad
    u = mt.random.uniform(mt.backend.stream("u"), (1000,), -1, 1, np.float64).numpy()
    assert u.dtype == np.float64 and -1 <= u.min() < -0.9 and 0.9 < u.max() < 1
    assert abs(mt.random.bernoulli(mt.backend.stream("b"), (1000,), 0.2).numpy().mean() - 0.2) < 0.05
    x = leaf(*[1.0] * 1000)
    y = mt.dropout(x, 0.25, mt.backend.stream("d"))
    y.sum().backward()
    np.testing.assert_array_equal(y.numpy(), x.grad.numpy())
    assert set(y.numpy()) == {0.0, 1 / 0.75} and abs(y.numpy().mean() - 1) < 0.1


def test_methods_are_torchs():
    a = rng.standard_normal((2, 3, 4))
    x = mt.tensor(a)
    same = lambda got, expected: np.testing.assert_allclose(got.numpy(), expected)      # noqa: E731
    same(x.transpose(0, 2), a.transpose(2, 1, 0))
    same(mt.tensor(a[0]).transpose(0, 1), a[0].T)
    same(x.permute(1, 2, 0), a.transpose(1, 2, 0))
    same(x.sum(dim=(0, 2), keepdim=True), a.sum((0, 2), keepdims=True))
    same(x.var(1), a.var(1, ddof=1))
    same(x.std(dim=-1), a.std(-1, ddof=1))
    same(x.unsqueeze(-1), a[..., None])
    same(x[:1].expand(5, -1, 4), np.broadcast_to(a[:1], (5, 3, 4)))
    same(x.repeat(2, 1, 3), np.tile(a, (2, 1, 3)))
    same(x.repeat_interleave(2, dim=1), np.repeat(a, 2, 1))
    same(x.clamp(max=0.5), np.minimum(a, 0.5))
    same(x.flatten(1), a.reshape(2, 12))
    same(x.masked_fill(x > 0, 9.0), np.where(a > 0, 9.0, a))
    index = np.array([[[2, 0, 1, 1]]])
    same(x.gather(1, index), np.take_along_axis(a[:1], index, 1))
    same(x.index_select(2, [3, 3]), a[:, :, [3, 3]])
    assert [p.shape[2] for p in x.split(3, -1)] == [3, 1] and [p.shape[1] for p in x.chunk(2, 1)] == [2, 1]
    assert [p.shape[1] for p in x.split([1, 2], 1)] == [1, 2] and len(mt.split(x, 2, axis=2)) == 2
    for got, expected in zip(mt.split(a, [1, -1], 2), np.split(a, [1, -1], 2), strict=True):
        np.testing.assert_array_equal(got, expected)
    values, places = x.topk(2, dim=1)
    same(values, -np.sort(-a, 1)[:, :2])
    same(places, np.argsort(-a, 1)[:, :2])


def test_attention_masks_and_empty_rows():
    q, k, v = (rng.standard_normal((2, 4, 3, 5)) for _ in range(3))
    mask = np.array([[True, False, False], [False, False, False], [True, True, True]])
    y = mt.scaled_dot_product_attention(q, k[:, :2], v[:, :2], attn_mask=mask)
    np.testing.assert_allclose(y[:, 0, 0], v[:, 0, 0])
    assert (y[:, :, 1] == 0).all()
    causal = mt.scaled_dot_product_attention(q, k, v, is_causal=True)
    s = np.where(np.tri(3, dtype=bool), q @ k.swapaxes(2, 3) / np.sqrt(5), -np.inf)
    p = np.exp(s) / np.exp(s).sum(-1, keepdims=True)
    np.testing.assert_allclose(causal, p @ v)
    mt.check_grads(lambda q, v: mt.scaled_dot_product_attention(q, k[:1], v, mask), (q[:1], v[:1]))


def test_batch_norm_returns_the_batchs_mean_and_biased_variance():
    x = rng.standard_normal((4, 3, 5))
    y, m, v = mt.batch_norm(x)
    np.testing.assert_allclose(m, x.mean((0, 2)))
    np.testing.assert_allclose(v, x.var((0, 2)))
    np.testing.assert_allclose(y.var((0, 2)), 1, atol=1e-4)


@pytest.mark.parametrize("name, args", [
    ("flip", ((0, 2),)), ("flip", ()), ("tile", ((2, 1),)), ("tile", ((2, 1, 1, 3),)), ("repeat", (3,)),
    ("repeat", (2, -1)), ("moveaxis", (0, -1)), ("moveaxis", ((0, 1), (2, 0))), ("swapaxes", (0, 2)),
    ("expand_dims", ((0, -1),)), ("squeeze", ()), ("squeeze", (1,)), ("ravel", ()), ("take", ([1, -1], 2)),
    ("take", ([[0, 7]],)), ("take_along_axis", (np.array([[[3, 0]], [[-1, -1]]]), 2)), ("cumsum", ()), ("clip", (0, 1)),
    ("argsort", (0,)), ("outer", (np.arange(3.0),)), ("tensordot", (rng.standard_normal((4, 1, 2)), 2)),
    ("mod", (0.7,)), ("floor_divide", (0.7,)), ("square", ()), ("reciprocal", ()), ("ceil", ()), ("isnan", ()),
    ("logical_and", (True,)), ("logical_xor", (True,)), ("logical_not", ()), ("isfinite", ())])
def test_values_are_numpys(name, args):
    x = rng.standard_normal((2, 1, 4)).swapaxes(0, 0)[:, :, ::-1]
    if name == "tensordot":
        x = rng.standard_normal((2, 4, 1))
    np.testing.assert_allclose(getattr(mt, name)(mt.tensor(x), *args).numpy(), getattr(np, name)(x, *args))


@pytest.mark.parametrize("index", [rng.integers(-20, 20, 90), (rng.integers(-20, 20, 300), rng.integers(-4, 4, 300)),
                                   (rng.integers(0, 20, (90, 1)), rng.integers(0, 4, 4))],
                         ids=["rows", "pairs", "grid"])
def test_many_scattered_additions_equal_numpys(index):
    values = rng.standard_normal(np.empty((20, 4))[index].shape)
    expected = np.zeros((20, 4))
    np.add.at(expected, index, values)
    np.testing.assert_allclose(mt.scatter_add(values, index, (20, 4)), expected)
    with pytest.raises(IndexError):
        mt.scatter_add(np.ones((300, 4)), np.full(300, -21), (20, 4))


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("shape", [(5, 100), (5, 300, 2)])
def test_scattered_additions_by_narrow_indices(dtype, shape):
    index = tuple(rng.integers(-5 if dtype == np.int8 else 0, 5, 400).astype(dtype) for _ in range(2))
    index[1][:] += dtype(90 if shape[1] == 100 else 100)
    values, expected = rng.standard_normal((400, *shape[2:])), np.zeros(shape)
    np.add.at(expected, index, values)
    np.testing.assert_allclose(mt.scatter_add(values, index, shape), expected)


@pytest.mark.parametrize(("function", "shapes"), [
    (mt.linear, [(2, 3), (4, 3), (4,)]), (mt.linear_gelu, [(2, 3), (4, 3), (4,)]),
    (mt.conv2d, [(2, 3, 4, 4), (4, 3, 2, 2), (4,)]), (lambda *a: mt.batch_norm(*a)[0], [(6, 3, 2), (3,), (3,)])])
@pytest.mark.parametrize("wide", [1, 2])
def test_fused_ops_promote_to_the_widest_of_their_weights(function, shapes, wide):
    values = [rng.standard_normal(s).astype(np.float32) for s in shapes]
    exact = function(*[v.astype(np.float64) for v in values])
    leaves = [mt.tensor(v, np.float64 if i == wide else None, requires_grad=True) for i, v in enumerate(values)]
    y, (_, tangent) = function(*leaves), mt.jvp(lambda x: function(x, *leaves[1:]), (values[0],), (values[0],))
    y.sum().backward()
    assert y.dtype == tangent.dtype == np.float64
    np.testing.assert_allclose(y.numpy(), exact, rtol=1e-5, atol=1e-5)
    assert [leaf.grad.dtype for leaf in leaves] == [leaf.dtype for leaf in leaves]
