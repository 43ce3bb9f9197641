"""Arithmetic on integers: bit by bit against plain Python, and never beyond what its types hold."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import minitorch_dist as mt
from minitorch_dist import nn
from minitorch_dist.compress import (
    QuantizedTensor,
    QuantParams,
    Scheme,
    describe,
    integer_matmul,
    quant_integer,
    quantize,
    quantize_model,
)
from minitorch_dist.compress.quant_integer import check_accumulator, exact_dtype, quantize_multiplier, rescale

from . import quant_reference as reference

INT32 = st.integers(-2 ** 31, 2 ** 31 - 1)
DTYPE = np.dtype(np.float32)


# ---------------------------------------------------------------- products

@pytest.mark.parametrize("k", [1, 1031, 1032, 1033, 5000])
@pytest.mark.parametrize("extreme", [(-128, 127), (-128, -128), (127, 127), (-127, -128)], ids=str)
def test_products_are_exact(k, extreme):
    """All factors at the ends of int8, and random ones, against NumPy's int64."""
    random = np.random.default_rng(k)
    a, b = np.full((3, k), extreme[0], np.int8), np.full((k, 2), extreme[1], np.int8)
    a[1], b[:, 1] = random.integers(-128, 128, k), random.integers(-128, 128, k)
    found = integer_matmul(a, b)
    assert found.dtype == np.int64 and (found == a.astype(np.int64) @ b.astype(np.int64)).all()
    assert found[0, 0] == k * extreme[0] * extreme[1]


def test_how_far_float32_counts():
    """-128 … 127 times -127 … 127: 1032 terms; the next odd number after 2^24 shows why."""
    assert [exact_dtype(k, 128 * 127) for k in (1032, 1033)] == [np.float32, np.float64]
    assert exact_dtype(1024, 2 ** 14) == np.float32 and exact_dtype(1025, 2 ** 14) == np.float64
    a, b = np.full((1, 1034), -127, np.int8), np.full((1034, 1), -127, np.int8)
    a[0, -1] = b[-1, 0] = 1
    total = 1033 * 127 ** 2 + 1
    assert integer_matmul(np.repeat(a, 2, 1), np.repeat(b, 2, 0))[0, 0] == 2 * total > 2 ** 24
    a[0], b[:, 0] = -128, -128      # whose abs, in NumPy, is -128
    a[0, -1] = b[-1, 0] = 1
    assert integer_matmul(a, b)[0, 0] == 1033 * 128 ** 2 + 1 > 2 ** 24
    with pytest.raises(OverflowError, match="beyond 2\\^53"):
        exact_dtype(2 ** 40, 2 ** 14)
    with pytest.raises(TypeError, match="of float32 and int8: it multiplies integers"):
        integer_matmul(a.astype(np.float32), b)


# ---------------------------------------------------------------- rescaling

@settings(max_examples=250, deadline=None)
@given(INT32, st.integers(2 ** 30, 2 ** 31 - 1), st.integers(-31, 30))
@example(-2 ** 31, 2 ** 31 - 1, 0)
@example(2 ** 31 - 1, 2 ** 31 - 1, 1)
@example(3 << 8, 2 ** 30, -9)       # a half, upwards and downwards
@example(-3 << 8, 2 ** 30, -9)
@example(-(2 ** 30), 1 << 30, -1)
def test_rescale_rounds_once(acc, multiplier, shift):
    found = rescale(np.array([acc]), np.array([multiplier]), np.array([shift])).item()
    exact = acc * multiplier * Fraction(2) ** (shift - 31)
    assert found == max(-2 ** 31, min(2 ** 31 - 1, math.floor(exact + Fraction(1, 2))))     # a half goes up


@settings(max_examples=100, deadline=None)
@given(st.floats(1e-8, 1e8))
@example(1.0)
@example(1 - 2 ** -53)
def test_multipliers(real):
    multiplier, shift = (int(v) for v in quantize_multiplier(np.array(real)))
    assert (multiplier, shift) == reference.multiplier_of(reference.Fraction(real))
    assert 2 ** 30 <= multiplier < 2 ** 31 and abs(multiplier * 2.0 ** (shift - 31) / real - 1) <= 2.0 ** -31


def test_multipliers_beyond_both_ends():
    multiplier, shift = quantize_multiplier([1e-12, 1.0])
    assert multiplier.tolist() == [0, 2 ** 30] and shift.tolist() == [0, 1]
    found = rescale(np.array([[2 ** 31 - 1], [2 ** 30 - 1], [-2 ** 31]]), multiplier, shift)
    assert found.tolist() == [[0, 2 ** 31 - 1], [0, 2 ** 30 - 1], [0, -2 ** 31]]


# ---------------------------------------------------------------- whole networks of integers

def quantized(model, x, bits=8, per_channel=True):
    return quantize_model(model, Scheme("integer", bits=bits, per_channel=per_channel), [x])


def integers(layer):
    """(q weight, q bias, unit of each accumulator, input zero point) as plain Python."""
    units = np.broadcast_to(layer.weight_scale.astype(np.float64) * float(layer.input_scale), len(layer.integers()))
    bias = [0] * len(units) if layer.bias is None else layer.bias.tolist()
    return layer.integers().tolist(), bias, units.tolist(), int(layer.input_zero_point)


def grid(layer):
    """(scale, zero point) of a layer's input."""
    return float(layer.input_scale), int(layer.input_zero_point)


@pytest.mark.parametrize("bits, per_channel", [(8, True), (8, False), (4, True), (2, True)])
def test_a_network_bit_by_bit(bits, per_channel):
    """Convolutions with stride, padding and groups, ReLU, maxima and means with padding, linear layers; from int8 to
    the last accumulator."""
    mt.manual_seed(bits)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2, padding=1), nn.Conv2d(4, 6, 2, groups=2, bias=False),
        nn.AvgPool2d(2, padding=1), nn.Flatten(), nn.Linear(24, 9), nn.ReLU(), nn.Dropout(0.5), nn.Linear(9, 5))
    x = np.random.default_rng(5).standard_normal((6, 2, 5, 5)).astype(np.float32)
    small = quantized(model, x, bits, per_channel)
    first, _, _, second, mean, _, third, _, _, last = small
    q = quantize(x, first.input)
    with mt.no_grad():
        found = small(QuantizedTensor(q, first.input, DTYPE)).numpy()
        assert (small(mt.tensor(x)).numpy() == found).all()
    held, (scale, zero) = QuantizedTensor(q, first.input, DTYPE), grid(first)
    np.testing.assert_allclose(held.dequantize().numpy(), (q - float(zero)) * scale, rtol=1e-6)
    assert held.shape == x.shape and str(describe(small)).splitlines()[5].split()[:2] == ["4", "AvgPool2d"]
    for image, logits in zip(q.tolist(), found, strict=True):
        weight, bias, units, zero = integers(first)
        h = reference.regrid(reference.conv(image, zero, weight, bias, 1, 1), units, *grid(second))
        h = reference.windows(reference.lowest(h, grid(second)[1]), 2, max, 1, -128)
        weight, bias, units, zero = integers(second)
        h = reference.regrid(reference.conv(h, zero, weight, bias, 1, 0, 2), units, *grid(mean))
        sums = reference.windows(h, 2, sum, 1, grid(mean)[1])
        h = [a - 4 * grid(mean)[1] for channel in sums for row in channel for a in row]
        h = reference.regrid(h, [grid(mean)[0] / 4] * len(h), *grid(third))
        weight, bias, units, zero = integers(third)
        h = reference.regrid(reference.linear(h, zero, weight, bias), units, *grid(last))
        weight, bias, units, zero = integers(last)
        acc = reference.linear(reference.lowest(h, zero), zero, weight, bias)
        assert logits.tolist() == [np.float32(a * u) for a, u in zip(acc, units, strict=True)]
    with mt.no_grad():
        assert np.abs(found - model.eval()(x).numpy()).max() < (0.06 if bits == 8 else 2)


def test_sequences_and_strides():
    """Conv1d, dilated and strided, against a float64 convolution of the integers themselves."""
    mt.manual_seed(1)
    model = nn.Conv1d(3, 4, 3, stride=2, padding=2, dilation=2)
    x = np.random.default_rng(6).standard_normal((2, 3, 11)).astype(np.float32) + 2
    small = quantized(model, x)
    q, zero = quantize(x, small.input).astype(np.float64), int(small.input_zero_point)
    acc = mt.conv1d(q - zero, small.integers().astype(np.float64), small.bias.astype(np.float64), 2, 2, 2)
    unit = small.weight_scale.astype(np.float64) * float(small.input_scale)
    with mt.no_grad():
        np.testing.assert_array_equal(small(x).numpy(), (acc * unit[:, None]).astype(np.float32))


def test_a_wide_layer_is_exact():
    """5,000 inputs at the ends of their range, and weights at the ends of theirs."""
    layer = nn.Linear(5000, 3)
    with mt.no_grad():
        layer.weight[...] = np.where(np.random.default_rng(7).random((3, 5000)) < 0.1, -0.5, 0.5).astype(np.float32)
    x = np.full((4, 5000), -1.0, np.float32)
    x[1], x[2, ::2], x[3] = 1, 1, np.random.default_rng(8).uniform(-1, 1, 5000)
    small = quantized(layer, x)
    weight, bias, units, zero = integers(small)
    wanted = [[np.float32(a * u) for a, u in zip(reference.linear(row, zero, weight, bias), units, strict=True)]
              for row in quantize(x, small.input).tolist()]
    with mt.no_grad():
        assert small(x).numpy().tolist() == wanted
        most = 5000 * 0.5 * (2 / 255) / 2       # half a step of each input, times its weight
        np.testing.assert_allclose(quantize_model(layer, "dynamic")(x).numpy(), layer(x).numpy(), atol=1.01 * most)


@pytest.mark.parametrize("kind", ["integer", "dynamic"])
def test_an_accumulator_that_leaves_int32(kind):
    layer = nn.Sequential(nn.Linear(70_000, 1, weight_init=lambda shape, dtype: np.ones(shape, dtype)))
    with pytest.raises(OverflowError, match="^0: the accumulator may reach 2,266,950,000 with 70,000 products of 8 and "
                                            "8 bits, more than int32's 2,147,483,647: use fewer bits"):
        quantize_model(layer, kind, [np.array([[0.0] * 69_999 + [1.0]], np.float32)] if kind == "integer" else None)
    quantize_model(layer, Scheme(kind, bits=4), [np.zeros((1, 70_000))] if kind == "integer" else None)


@pytest.mark.parametrize("seed", range(6))
def test_the_worst_case_is_the_worst_case(seed, monkeypatch):
    """Against the largest sum found by trying all inputs of two numbers."""
    random = np.random.default_rng(seed)
    weight, bias, zero = random.integers(-7, 8, (2, 2)), random.integers(-9, 9, 2), int(random.integers(-4, 4))
    p = QuantParams(1.0, zero, 3)
    sums = [[(a - zero) * int(w[0]) + (b - zero) * int(w[1]) + int(c) for a in range(-4, 4) for b in range(-4, 4)]
            for w, c in zip(weight, bias, strict=True)]
    worst = max(abs(s) for row in sums for s in row)
    monkeypatch.setattr(quant_integer, "INT32", worst)
    check_accumulator("layer", weight, bias, p)
    monkeypatch.setattr(quant_integer, "INT32", worst - 1)
    with pytest.raises(OverflowError, match=f"may reach {worst} "):
        check_accumulator("layer", weight, bias, p)


@pytest.mark.parametrize("per_channel", [True, False])
def test_a_bias_that_dwarfs_its_weights(per_channel):
    """Channels of zeros, or of next to nothing, whose bias would not fit into int32 in units of their scale."""
    layer = nn.Linear(3, 4)
    with mt.no_grad():
        layer.weight[...] = np.array([[0, 0, 0], [1e-12, 0, 1e-12], [1e-3, 2e-3, 0], [0, 0, 0]], np.float32)
        layer.bias[...] = np.array([0.3, -700.0, 0.2, 0], np.float32)
    x = np.random.default_rng(9).standard_normal((50, 3)).astype(np.float32)
    with mt.no_grad():
        np.testing.assert_allclose(quantized(layer, x, per_channel=per_channel)(x).numpy(), layer(x).numpy(),
                                   atol=1e-4, rtol=1e-5)
