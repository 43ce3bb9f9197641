"""Numbers of few bits: closed forms, properties, the straight-through gradient, observers."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minitorch_dist as mt
from minitorch_dist.compress import OBSERVERS, QuantParams, dequantize, fake_quantize, params_of_range, quantize
from minitorch_dist.compress.quant_observers import SHRUNK, MinMax, MovingAverage, Percentile, weight_params
from minitorch_dist.compress.quantize import WIDTHS, pack, unpack

NUMBERS = st.floats(-1e6, 1e6, allow_subnormal=False)


def test_affine_by_hand():
    """256 steps over 4.0; 0 is a quarter of the way: -128 + 64."""
    params = params_of_range(-1.0, 3.0)
    assert (params.scale, params.zero_point, params.qmin, params.qmax) == (np.float32(4 / 255), -64, -128, 127)
    x = np.array([-1.0, 0.0, 4 / 255, 1.0, 3.0, -9.0, 9.0, np.inf, -np.inf], np.float32)
    assert quantize(x, params).tolist() == [-128, -64, -63, 0, 127, -128, 127, 127, -128]
    assert quantize(x, params).dtype == np.int8 and dequantize(quantize(x, params), params)[1] == 0.0


def test_symmetric_by_hand():
    params = params_of_range(-1.0, 3.5, bits=4, symmetric=True)
    assert (params.scale, params.zero_point, params.qmin, params.qmax) == (0.5, 0, -7, 7)
    assert params.range == (-3.5, 3.5)
    assert quantize(np.array([-4.0, 0.5, 1.0]), params).tolist() == [-7, 1, 2]
    assert [params_of_range(-1, 1, bits, True).qmax for bits in (2, 3, 8)] == [1, 3, 127]


def test_halves_go_to_the_even_one():
    x = np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5])
    assert quantize(x, QuantParams(1.0, 0)).tolist() == [-2, -2, 0, 0, 2, 2, 4]
    assert quantize(x, QuantParams(1.0, 1)).tolist() == [-1, -1, 1, 1, 3, 3, 5]      # before the zero point is added


def test_channels_have_scales_of_their_own():
    x = np.array([[1.0, -2.0], [10.0, 30.0], [0.0, 0.0]])
    params = params_of_range(x.min(1), x.max(1), 8, True, axis=0)
    np.testing.assert_allclose(params.scale, [2 / 127, 30 / 127, 1], rtol=1e-7)
    assert quantize(x, params).tolist() == [[64, -127], [42, 127], [0, 0]]
    turned = QuantParams(params.scale, params.zero_point, 8, True, axis=1)
    assert (quantize(x.T, turned) == quantize(x, params).T).all()
    with pytest.raises(ValueError, match=r"shape \(2, 3\) has no 3 channels along axis 0"):
        quantize(x.T, params)


@settings(max_examples=150, deadline=None)
@given(st.lists(NUMBERS, min_size=1, max_size=20), st.integers(2, 8), st.booleans(), st.booleans())
def test_within_half_a_step(values, bits, symmetric, single):
    """Inside of the observed range, by exact arithmetic; 0 is always exact."""
    x = np.array(values, np.float32 if single else np.float64)
    params = params_of_range(x.min(), x.max(), bits, symmetric)
    q = quantize(x, params)
    step, zero = Fraction(float(params.scale)), int(params.zero_point)
    slack = step * (Fraction(1, 2) + Fraction(1, 10 ** 4))       # the scale is rounded to float32, and so is x / scale
    assert all(abs(Fraction(float(v)) - (int(n) - zero) * step) <= slack for v, n in zip(x, q, strict=True))
    assert params.qmin <= q.min() and q.max() <= params.qmax and params.qmin <= zero <= params.qmax
    assert dequantize(quantize(np.zeros(1), params), params) == 0.0


@settings(max_examples=60, deadline=None)
@given(st.floats(1e-30, 1e30), st.integers(-128, 127), st.sampled_from([np.float32, np.float64]))
def test_integers_come_back(scale, zero, dtype):
    params = QuantParams(scale, zero)
    q = np.arange(-128, 128).astype(np.int8)
    assert (quantize(dequantize(q, params, dtype), params) == q).all()


@pytest.mark.parametrize("bits", sorted(WIDTHS))
def test_packed_as_bytes(bits):
    q = np.random.default_rng(bits).integers(-(1 << bits - 1), 1 << bits - 1, (7, 3)).astype(np.int8)
    packed = pack(q, bits)
    assert packed.nbytes == -(-21 * WIDTHS[bits] // 8) and (unpack(packed, bits, (7, 3)) == q).all()


def test_two_in_a_byte_by_hand():
    assert pack(np.array([1, -1, -8], np.int8), 4).tolist() == [0xF1, 0x08]
    assert pack(np.array([1, -1, 0, -2, 1], np.int8), 2).tolist() == [0b10_00_11_01, 0b01]


@pytest.mark.parametrize("low, high, scale, zero", [
    (0, 0, 1.0, -128), (-5.1, -5.1, 0.02, 127), (5.1, 5.1, 0.02, -128), (-2.0, -1.0, 2 / 255, 127),
    (1.0, 2.0, 2 / 255, -128), (-1e-42, 1e-42, 2.0 ** -126, -128), (-3e38, 3e38, 6e38 / 255, 0)])
def test_ranges_at_the_edge(low, high, scale, zero):
    """Nothing but zeros, one value, all of one sign, beyond what float32 can subtract: 0 is inside."""
    params = params_of_range(low, high)
    np.testing.assert_allclose(params.scale, scale, rtol=1e-6)
    assert abs(int(params.zero_point) - zero) <= 1
    x = np.array([low, high, 0], np.float32)
    assert np.abs(dequantize(quantize(x, params), params).astype(np.float64) - x).max() <= 0.51 * float(params.scale)


def test_what_is_no_number():
    params = params_of_range(-1, 1)
    with pytest.raises(ValueError, match="1 of 2 values are NaN"):
        quantize(np.array([1.0, np.nan]), params)
    assert np.isnan(fake_quantize(np.array([np.nan, 1.0], np.float32), params))[0]
    for low, high in ((np.nan, 1), (0, np.inf), (-np.inf, 1), (2, 1)):
        with pytest.raises(ValueError, match="it must be finite, and begin before it ends"):
            params_of_range(low, high)
    for bits in (0, 1, 33):
        with pytest.raises(ValueError, match=f"of {bits} bits: it must be 2 to 32"):
            params_of_range(0, 1, bits)
    for scale, zero, words in ((0.0, 0, "more than 0"), (np.nan, 0, "finite"), (np.inf, 0, "finite and more than 0"),
                               ([1.0], 0, "per tensor it is one")):
        with pytest.raises(ValueError, match=words):
            QuantParams(scale, zero)
    with pytest.raises(ValueError, match="2 scales and 1 zero points: as many of each"):
        QuantParams([1.0, 2.0], [0], axis=0)
    for zero in (128, -129, 0.5, np.nan):
        with pytest.raises(ValueError, match=f"zero points {zero}: they must be whole numbers, -128 to 127"):
            QuantParams(1.0, zero)
    with pytest.raises(ValueError, match="zero points 3: they must be 0 where the range is symmetric"):
        QuantParams(1.0, 3, symmetric=True)
    assert quantize(np.zeros((0, 3), np.float32), params).shape == (0, 3)


def test_it_prints():
    assert str(params_of_range(-1, 3)) == \
        "int8 affine per tensor: scale 0.01569, zero point -64, range -1.004 … 2.996"
    assert "int4 symmetric per channel (axis 0, 2 of them): scale 0.1429 … 0.2857" in \
        str(params_of_range([-1, 0], [0, 2], 4, True, 0))


# ---------------------------------------------------------------- the straight-through gradient

def test_gradient_by_hand():
    """1 on the 15 numbers and half a step beyond either end, 0 outside; the cotangent passes as it is."""
    params = params_of_range(-1, 2.75, 4)
    assert params.range == (-1.0, 2.75)
    x = mt.tensor([-9.0, -1.126, -1.124, -1.0, -0.9, 0.0, 2.75, 2.87, 2.88, np.inf], np.float64, requires_grad=True)
    ct = np.arange(1.0, 11)
    y = fake_quantize(x, params)
    assert y.numpy().tolist() == [-1, -1, -1, -1, -1, 0, 2.75, 2.75, 2.75, 2.75]
    y.backward(mt.tensor(ct))
    assert x.grad.numpy().tolist() == [0, 0, 3, 4, 5, 6, 7, 8, 0, 0]


def test_the_largest_weight_of_a_channel_learns():
    """It is the end of the range, whichever way its scale was rounded."""
    w = np.random.default_rng(0).standard_normal((50, 9)).astype(np.float32)
    x = mt.tensor(w, requires_grad=True)
    for bits in (2, 4, 8):
        x.grad = None
        fake_quantize(x, weight_params(w, bits)).sum().backward()
        assert (x.grad.numpy() == 1).all()


def test_other_modes_and_dtypes():
    params = params_of_range([-1, -2.0], [1, 1.0], 4, True, 1)
    x = np.random.default_rng(1).standard_normal((5, 2)) * 2
    mask = np.abs(np.rint(x / params.scale)) <= 7
    tangent = np.random.default_rng(2).standard_normal(x.shape)
    y, dy = mt.jvp(lambda x: fake_quantize(x, params) * 3, (x,), (tangent,))
    np.testing.assert_array_equal(dy, np.where(mask, 3 * tangent, 0))
    np.testing.assert_allclose(y, 3 * dequantize(quantize(x, params), params, np.float64))
    for dtype in (np.float32, np.float64):
        narrow = fake_quantize(mt.tensor(x.astype(dtype), requires_grad=True), params)
        assert narrow.dtype == dtype
        np.testing.assert_array_equal(narrow.numpy(), dequantize(quantize(x.astype(dtype), params), params, dtype))


# ---------------------------------------------------------------- observers

def test_minmax_and_the_moving_average():
    batches = [np.array([1.0, 4.0]), np.array([-2.0, 3.0]), np.array([]), np.array([0.0, 12.0])]
    for kind, wanted in ((MinMax, (-2, 12)), (MovingAverage, ((1 * .9 - 2 * .1) * .9, (4 * .9 + .3) * .9 + 1.2))):
        observer = kind()
        for batch in batches:
            observer.observe(batch)
        np.testing.assert_allclose(observer.range, wanted)
    channels = MinMax(axis=0, symmetric=True)
    channels.observe(np.array([[1.0, -3.0], [0.5, 0.0]]))
    channels.observe(np.array([[2.0, 1.0], [0.0, 9.0]]))
    np.testing.assert_allclose(channels.params().scale, [3 / 127, 9 / 127], rtol=1e-6)


@pytest.mark.parametrize("name", sorted(OBSERVERS))
def test_what_observers_refuse(name):
    observer = OBSERVERS[name]()
    observer.observe(np.zeros((0, 4)))
    with pytest.raises(ValueError, match="has observed nothing: give it at least one batch"):
        observer.params()
    with pytest.raises(ValueError, match="2 NaN and 1 infinite values of 4"):
        observer.observe(np.array([np.nan, np.inf, 0, np.nan]))
    for infinite in (np.inf, -np.inf):
        with pytest.raises(ValueError, match="0 NaN and 1 infinite values of 2"):
            observer.observe(np.array([infinite, 1]))
    observer.observe(np.zeros(5))
    assert observer.params().scale == 1 and quantize(np.zeros(3), observer.params()).tolist() == [-128] * 3


@pytest.mark.parametrize("make, words", [
    (lambda: Percentile(axis=0), "Percentile with axis=0: a histogram is kept per tensor"),
    (lambda: Percentile(percentile=50), "percentile 50: .* more than 50"),
    (lambda: Percentile(percentile=100.5), "percentile 100.5: "),
    (lambda: weight_params(np.ones((2, 3)), observer="percentile"), "'minmax' or 'mse', not by 'percentile'")])
def test_observers_that_cannot_be(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("percentile", [60.0, 99.0, 99.9])
def test_percentiles_of_batches_that_grow(percentile):
    """Against NumPy's of all values together; the histogram widens six times on its way."""
    x = np.random.default_rng(3).standard_normal((20, 500)) * np.linspace(0.1, 10, 20)[:, None]
    observer = Percentile(percentile=percentile)
    for batch in x:
        observer.observe(batch)
    wanted = np.percentile(x, [50 - percentile / 2, 50 + percentile / 2])
    np.testing.assert_allclose(observer.chosen(), wanted, atol=4 * observer.width, rtol=0.02)
    assert observer.width <= 2 * np.abs(x).max() / 2048 and observer.counts.sum() == x.size


def test_least_squared_error():
    """The range is the best of those tried, on the histogram and, for weights, by row; far from the outlier."""
    x = np.random.default_rng(4).standard_normal(4000)
    x[17] = 40.0
    observer = OBSERVERS["mse"](bits=4)
    observer.observe(x)

    def error(params, x=x):
        return ((dequantize(quantize(x, params), params, np.float64) - x) ** 2).sum()
    tried = [error(params_of_range(x.min() * f, x.max() * f, 4)) for f in SHRUNK]
    assert error(observer.params()) <= 1.02 * min(tried) < 0.5 * tried[0]
    rows = x.reshape(4, 1000)
    best, plain = (weight_params(rows, 4, True, kind) for kind in ("mse", "minmax"))
    for i, row in enumerate(rows):
        tried = [error(params_of_range(row.min() * f, row.max() * f, 4, True), row) for f in SHRUNK]
        alone = QuantParams(best.scale[i], 0, 4, True)
        np.testing.assert_allclose(error(alone, row), min(tried), rtol=1e-5)
        assert alone.scale < plain.scale[i]


def test_whole_numbers_are_rounded_like_real_ones():
    params = params_of_range(0.0, 9.0)
    np.testing.assert_allclose(fake_quantize(np.arange(5), params), fake_quantize(np.arange(5.0), params), rtol=1e-6)


def test_the_range_of_many_bits():
    low, high = params_of_range(-1.1, 1.3, bits=32).range
    np.testing.assert_allclose([low, high], [-1.1, 1.3], rtol=1e-6)
