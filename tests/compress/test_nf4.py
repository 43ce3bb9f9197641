"""NF4 against the paper's numbers, and against a search through all levels."""

import tracemalloc

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import nn
from minitorch_dist.autodiff.check import check_grads
from minitorch_dist.compress import nf4
from minitorch_dist.compress.formats import E4M3
from minitorch_dist.compress.nf4 import NF4Weight
from tests.device.fake_cupy import installed, transfers

# Dettmers et al. 2023, appendix E
PUBLISHED = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
SHAPES = [(7, 13), (64, 64), (3, 64 * 256), (1, 1), (5, 300)]


def weight(shape, seed=0):
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def by_hand(w, double):
    """The weight behind NF4, by the level next to each number among all."""
    levels, flat = np.array(PUBLISHED), w.reshape(-1).astype(np.float64)
    absmax = np.array([abs(flat[i:i + 64]).max() for i in range(0, w.size, 64)], np.float32)
    if double:
        mean, kept = absmax.mean(dtype=np.float32), []
        for i in range(0, len(absmax), 256):
            block = absmax[i:i + 256] - mean
            greatest = abs(block).max()
            unit = np.float32(448) / (greatest or 1)
            kept += list(E4M3.rounded((block * unit).astype(np.float64)) / 448 * greatest + mean)
        assert abs(np.array(kept) - absmax).max() <= 2 ** -4 * abs(absmax - mean).max()
        absmax, exact = np.maximum(kept, 0), absmax
    else:
        exact = absmax
    each = np.repeat(exact, 64)[:w.size], np.repeat(absmax, 64)[:w.size]
    shares = np.divide(flat, each[0], out=np.zeros(w.size), where=each[0] > 0)
    out = levels[abs(levels - shares[:, None]).argmin(1)] * each[1]
    return out.reshape(w.shape)


def test_the_levels_are_the_papers():
    np.testing.assert_allclose(nf4.NF4, PUBLISHED, atol=3e-7)
    assert nf4.NF4[7] == 0 and nf4.NF4.dtype == np.float32


def test_the_8_bit_levels_are_all_numbers_of_e4m3():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(nf4.E4M3, np.unique(every[np.isfinite(every)]) / np.float32(448))


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_are_the_nearest_ones(shape, double):
    w = weight(shape)
    w.reshape(-1)[64:128] = 0
    np.testing.assert_allclose(NF4Weight(w, double).dequantize(np.float64), by_hand(w, double), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_are_counted(shape):
    n, blocks = shape[0] * shape[1], -(-shape[0] * shape[1] // 64)
    once, twice = (NF4Weight(weight(shape), double).nbytes for double in (False, True))
    assert once == blocks * (32 + 4) and twice == blocks * (32 + 1) + 4 * -(-blocks // 256) + 4
    if n % (64 * 256) == 0:
        assert 8 * once / n == 4.5 and 8 * (twice - 4) / n == 4 + 8 / 64 + 32 / (64 * 256)      # 4.127


def test_what_rounds_below_zero_turns_no_sign():
    for greatest in 5, 10, 20, 40:      # which the absmaxs are rounded in units of
        w = np.ones((256, 64), np.float32)
        w[0], w[1:103] = greatest, 1e-4     # far below the mean
        assert (NF4Weight(w).dequantize() >= 0).all()


@pytest.mark.parametrize("double", [False, True])
def test_products_and_gradients_are_the_dequantised_weights(double):
    held, random = NF4Weight(weight((13, 9)), double), np.random.default_rng(1)
    w = held.dequantize(np.float64)
    x, ct = mt.tensor(random.standard_normal((2, 5, 9)), requires_grad=True), random.standard_normal((2, 5, 13))
    y = held.linear(x)
    y.backward(mt.tensor(ct))
    np.testing.assert_allclose(y.numpy(), x.numpy() @ w.T, rtol=1e-13)
    np.testing.assert_allclose(x.grad.numpy(), ct @ w, rtol=1e-13)
    check_grads(lambda x: mt.tanh(held.linear(mt.sin(x))), (random.standard_normal((3, 9)),), order=2)
    with mt.autocast("bfloat16"):
        assert held.linear(mt.tensor(np.ones((2, 9), np.float32))).dtype.name == "bfloat16"
    row = np.ones(9, np.float32)
    np.testing.assert_allclose(held.linear(mt.tensor(row)).numpy(), held.linear(mt.tensor(row[None])).numpy()[0],
                               rtol=1e-6)
    for wrong in np.ones((2, 8)), np.ones((2, 9), np.int64), np.ones(()):
        with pytest.raises(ValueError, match="a last axis of 9"):
            held.linear(mt.tensor(wrong))


def test_no_floats_are_kept_between_forward_and_backward():
    layer = NF4Weight(weight((512, 512)))
    x = mt.tensor(np.ones((4, 512), np.float32), requires_grad=True)
    w, seen = 512 * 512 * 4, []
    tracemalloc.start()
    try:
        y = layer.linear(x)
        seen.append(tracemalloc.get_traced_memory())
        tracemalloc.reset_peak()
        y.backward(mt.tensor(np.ones((4, 512), np.float32)))
        seen.append(tracemalloc.get_traced_memory())
    finally:
        tracemalloc.stop()
    for held, peak in seen:
        assert held < w / 20 and peak > w, (held, peak)       # taken apart, and dropped


def test_codes_that_were_overwritten_are_told():
    layer = nn.Sequential()
    layer.add_module("0", NF4Weight(weight((5, 70))))
    y = layer[0].linear(mt.tensor(np.ones((2, 70), np.float32), requires_grad=True))
    layer.load_state_dict(layer.state_dict())
    with pytest.raises(RuntimeError, match="nf4_linear.*load_state_dict"):
        y.backward(mt.tensor(np.ones((2, 5), np.float32)))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_inf_are_refused(bad):
    w = weight((3, 5))
    w[1, 1] = bad
    with pytest.raises(ValueError, match=r"\(3, 5\) has inf or NaN"):
        NF4Weight(w)


def test_on_a_gpu_a_product_and_its_gradient_send_nothing():
    """After the first, which has brought the tables of levels there."""
    held = NF4Weight(weight((7, 70)))
    with installed():
        there = nn.Sequential(held).to("cuda")[0]
        x = mt.tensor(weight((3, 70), 1), device="cuda", requires_grad=True)
        for _ in range(2):
            transfers.clear()
            there.linear(x).sum().backward()
        assert not transfers
