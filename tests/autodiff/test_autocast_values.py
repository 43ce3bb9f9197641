"""Autocast: what is computed is what a model of rounding in plain NumPy computes; 16 bits on the host are computed in
float32 and rounded once."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import nn
from minitorch_dist.autodiff.ops.windows import fold

from .autocast_cases import EPS, HEADS, IMAGE, KERNEL, distance, draws, each_dtype, passes, rounded


@each_dtype
def test_a_layer_is_what_rounding_in_plain_numpy_gives(dtype):
    """relu(x Wᵀ + b) Vᵀ and a loss: float32 products of rounded operands, rounded once. To the last bit."""
    randn, _ = draws()
    x, w, b, v = randn(5, 7), randn(6, 7), randn(6), randn(4, 6)
    labels = np.array([0, 3, 1, 2, 0])
    leaves = [mt.tensor(a, requires_grad=True) for a in (x, w, b, v)]
    with mt.autocast(dtype):
        hidden = mt.relu(mt.linear(*leaves[:3]))
        loss = nn.cross_entropy(mt.linear(hidden, leaves[3]), labels, reduction="sum")
    loss.backward()

    def low(a):
        return rounded(a, dtype)
    h = low(low(x) @ low(w).T + low(b))
    mask = h > 0
    h *= mask
    logits = low(h @ low(v).T)
    z = logits - logits.max(1, keepdims=True)
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    assert loss.dtype == np.float32
    np.testing.assert_allclose(loss.item(), -np.log(p[np.arange(5), labels]).sum(), rtol=1e-5)
    p[np.arange(5), labels] -= 1
    gl = low(p)
    gh = low(low(gl @ low(v)) * mask)
    wanted = low(gh @ low(w)), low(gh.T @ low(x)), low(gh.sum(0)), low(gl.T @ h)
    for got, expected in zip(leaves, wanted, strict=True):
        assert got.grad.dtype == np.float32
        # Where float32 rounds p another way, and that falls on a boundary of the 16 bits: one unit there.
        np.testing.assert_allclose(got.grad.numpy(), expected, rtol=2 * EPS[dtype], atol=2e-6)
        assert np.mean(got.grad.numpy() == expected) > 0.9


TOKENS = np.random.default_rng(12).integers(0, 11, (6, 6))
MODELS = {      # name -> (constructor, input, tolerance in units of EPS)
    "mlp": (lambda: nn.mlp((16, 12)), lambda randn: randn(6, 784), 2),
    "lenet": (nn.lenet, lambda randn: randn(6, 784), 40),       # of a maximum another element may win
    "gpt": (lambda: nn.GPT(11, 6, layers=2, heads=2, dim=8), lambda randn: TOKENS, 4),
    "gpt, rotary": (lambda: nn.GPT(11, 6, layers=1, heads=4, kv_heads=2, dim=8, positions="rotary", norm="rms",
                                   tied=False), lambda randn: TOKENS, 4),
}


@pytest.mark.parametrize("name", MODELS)
@each_dtype
def test_models_have_the_gradients_of_float32_but_for_rounding(name, dtype):
    make, inputs, tolerance = MODELS[name]
    mt.manual_seed(3)
    model, x = make(), inputs(draws(24)[0])
    model.zero_grad()
    nn.cross_entropy(model(x), x if x.dtype.kind == "i" else np.arange(6)).backward()
    exact = [p.grad.numpy().copy() for p in model.parameters()]
    low = passes(model, x, dtype)
    for a, b in zip(low, exact, strict=True):
        assert a.dtype == np.float32 and 0 < distance(a, b) < tolerance * EPS[dtype]
    for a, b in zip(low, passes(model, x, dtype, inside=True), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("function, shapes", [
    (np.matmul, ((3, 500), (500, 4))), (mt.matmul, ((2, 3, 500), (2, 500, 4))), (mt.linear, ((3, 500), (4, 500), (4,))),
    (lambda x, y: mt.einsum("bij,bkj->bik", x, y), ((2, 3, 500), (2, 4, 500))),
    (lambda x, y, z: mt.einsum("ij,jk,kl->il", x, y, z), ((20, 30), (30, 20), (20, 4))),
    (mt.conv2d, (IMAGE, KERNEL, (4,))),
    (mt.scaled_dot_product_attention, (HEADS, HEADS, HEADS)), (lambda x: mt.layer_norm(256 * x, 60), ((3, 60),)),
    (lambda x: mt.sum(x, 0), ((500, 3),)), (mt.softmax, ((3, 500),)), (lambda x: mt.cumsum(x, 0), ((3, 5),)),
    (lambda x: mt.mean(256 * mt.absolute(x), 1), ((3, 500),)), (lambda x: mt.var(x, 0), ((500, 3),)),
    (lambda x: x[np.arange(600) % 3], ((3, 2),)), (mt.sigmoid, ((3, 500),)),
    (lambda x: fold(x, (9,), (6,), (1,), (1,)), ((30, 4, 6),)),
    (lambda x, w, b: mt.batch_norm(x, w, b)[0], ((600, 3), (3,), (3,)))])
@each_dtype
def test_16_bits_on_the_host_are_computed_in_float32_and_rounded_once(function, shapes, dtype):
    randn, _ = draws()
    if function is np.matmul:
        function = mt.backend.matmul
    args = [randn(*shape, dtype=dtype) for shape in shapes]
    found, expected = function(*args), function(*(a.astype(np.float64) for a in args))
    assert found.dtype == dtype
    # Half a unit, and float32's rounding.
    np.testing.assert_allclose(np.float64(found), expected, rtol=0.51 * EPS[dtype], atol=1e-6)
    tensors = [mt.tensor(a, requires_grad=True) for a in args]
    wide = [mt.tensor(a.astype(np.float64), requires_grad=True) for a in args]
    ct = randn(*expected.shape, dtype=dtype)
    if function is not mt.backend.matmul:
        function(*tensors).backward(mt.tensor(ct))
        function(*wide).backward(mt.tensor(ct.astype(np.float64)))
        for a, b in zip(tensors, wide, strict=True):
            assert a.grad.dtype == dtype and distance(a.grad.numpy(), b.grad.numpy()) < EPS[dtype]


@each_dtype
def test_more_than_16_bits_can_count(dtype):
    """A sum one by one would end at 2048, or at 256. 4992 is a number of both."""
    ones = mt.tensor(np.ones((4992, 1), dtype), requires_grad=True)
    assert mt.cumsum(ones, 0)[-1, 0].item() == 4992 and mt.mean(mt.tensor(np.full(70_000, 3, dtype))).item() == 3
    assert mt.std(mt.tensor(np.array([-600, 600], dtype))).item() == 600      # of a variance of 360,000
    row = mt.tensor(np.ones((1, 1), dtype), requires_grad=True)
    row[np.zeros(4992, int)].backward(mt.tensor(np.ones((4992, 1), dtype)))
    assert row.grad.item() == 4992
    ties = mt.tensor(np.ones(4992, dtype), requires_grad=True)
    mt.max(ties).backward()
    np.testing.assert_allclose(np.float64(ties.grad.numpy()), 1 / 4992, rtol=EPS[dtype])


@each_dtype
def test_a_product_goes_where_it_is_wanted(dtype):
    randn, _ = draws()
    x, y = randn(3, 4, dtype=dtype), randn(4, 2, dtype=dtype)
    for wanted in (dtype, np.float32):
        out = np.full((3, 2), np.nan, wanted)
        assert mt.backend.matmul(x, y, out=out) is out
        np.testing.assert_array_equal(out, mt.backend.matmul(x, y))


def test_rounding_to_float16_is_numpys():
    """All magnitudes, halves between two neighbours, signs of zeros, inf and NaN; in arrays of any strides."""
    rng = np.random.default_rng(11)
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    every = every[np.isfinite(every)]
    between = (np.sort(every)[1:] + np.sort(every)[:-1]) / 2
    x = np.concatenate([every, between, np.nextafter(between, np.float32(np.inf)),
                        np.float32(10) ** rng.standard_normal(5000) * 1e-7,
                        -np.float32(2) ** rng.uniform(-149, 18, 5000), np.float32(2) ** rng.uniform(15, 128, 5000),
                        [65520, np.inf, np.finfo(np.float32).max, np.nan, -0.0]]).astype("f4")
    with np.errstate(all="ignore"):
        expected = x.astype(np.float16)
    for found in (mt.backend.to_half(x), mt.backend.to_half(x[::-1])[::-1], mt.backend.to_half(x[:-2]),
                  mt.backend.to_half(x[-300:]), [mt.backend.to_half(v) for v in x[-3:]]):
        here = slice(len(found)) if len(found) == len(x) - 2 else slice(-len(found), None)
        np.testing.assert_array_equal(np.asarray(found).view(np.uint16), expected[here].view(np.uint16))
    matrix = x[:9000].reshape(90, 100)
    assert mt.backend.to_half(matrix.T).strides == matrix.T.astype(np.float16).strides
    assert mt.backend.to_half(matrix).base is None      # whoever casts it again looks for what owns the memory
    np.testing.assert_array_equal(mt.backend.to_half(matrix.T), expected[:9000].reshape(90, 100).T)
    assert mt.backend.to_half(np.float64([1 / 3])).dtype == np.float16


def test_float16_in_float32_is_numpys():
    """All there are, NaN too, in arrays of any strides, many and few."""
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    for x in (every, every[::-1], every[5000:5099], every.reshape(256, 256).T, every.reshape(64, 8, 128)[:, ::3],
              every[:0], every[7]):
        found, expected = mt.backend.to_float32(x), x.astype(np.float32)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))
    matrix = every.reshape(256, 256).T
    assert mt.backend.to_float32(matrix).strides == matrix.astype(np.float32).strides


@pytest.mark.filterwarnings("error")
def test_what_is_too_large_becomes_inf_without_a_word():
    x = np.full((2, 2), 300, np.float32)
    with mt.autocast("float16"):
        assert np.isinf(mt.matmul(x, x)).all()
        assert mt.sum(mt.tensor(x).astype(np.float16) * 100).item() == 120_000
    with mt.autocast("bfloat16"):
        assert (mt.matmul(x, x) == 180_224).all()       # 180,000 in 8 bits
    assert np.isinf(mt.astype(np.full(3, 3.4e38, np.float32), "bfloat16")).all()
