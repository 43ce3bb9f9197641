"""Convolution and pooling layers against naive loops over every output element, in float64."""

import itertools
import math

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import nn
from minitorch_dist.autodiff.ops import convolution

random = np.random.default_rng


def convolve(x, w, b, stride, padding, dilation, groups):
    """One output element at a time; stride, padding and dilation one per axis."""
    axes = w.ndim - 2
    x = np.pad(x, [(0, 0), (0, 0), *((p, p) for p in padding)])
    inside, per_group = w.shape[1], w.shape[0] // groups
    extents = [(x.shape[2 + i] - dilation[i] * (w.shape[2 + i] - 1) - 1) // stride[i] + 1 for i in range(axes)]
    y = np.zeros((x.shape[0], w.shape[0], *extents))
    for at in np.ndindex(y.shape):
        sample, out, *place = at
        first = out // per_group * inside
        for c in range(inside):
            for k in np.ndindex(w.shape[2:]):
                where = tuple(p * s + j * d for p, s, j, d in zip(place, stride, k, dilation, strict=True))
                y[at] += x[(sample, first + c, *where)] * w[(out, c, *k)]
        y[at] += b[out] if b is not None else 0
    return y


SETTINGS = [    # (layer, input shape, output channels, kernel_size, options)
    (nn.Conv1d, (2, 4, 11), 8, 3, {}),
    (nn.Conv1d, (3, 4, 9), 8, 2, {"stride": 2, "padding": 3, "dilation": 2, "groups": 2}),
    (nn.Conv1d, (2, 4, 11), 4, 3, {"padding": 2, "dilation": 2, "groups": 4}),
    (nn.Conv2d, (2, 4, 6, 7), 8, 3, {"padding": 1}),
    (nn.Conv2d, (2, 4, 8, 5), 8, (3, 2), {"stride": (2, 1), "padding": (0, 2), "dilation": (1, 2)}),
    (nn.Conv2d, (2, 4, 5, 6), 8, 2, {"groups": 4, "bias": False}),
    (nn.Conv2d, (2, 4, 5, 6), 4, (3, 2), {"groups": 4}),
    (nn.Conv2d, (2, 4, 5, 5), 8, 1, {"stride": 2, "groups": 2}),
    (nn.Conv2d, (0, 4, 5, 5), 8, 3, {"padding": 1}),
]


@pytest.mark.parametrize(("kind", "shape", "out", "kernel", "options"), SETTINGS,
                         ids=lambda v: v.__name__ if isinstance(v, type) else str(v))
def test_convolution_and_its_gradients(kind, shape, out, kernel, options):
    mt.manual_seed(3)
    layer = kind(4, out, kernel, dtype=np.float64, **options)
    axes = kind.axes
    per_axis = {k: (v,) * axes if isinstance(v, int) else v
                for k, v in {"stride": 1, "padding": 0, "dilation": 1, **options}.items() if k in
                ("stride", "padding", "dilation")}
    x = random(0).standard_normal(shape)
    w = layer.weight.numpy().copy()
    b = layer.bias.numpy().copy() if layer.bias is not None else None

    def naive(x, w, b):
        return convolve(x, w, b, **per_axis, groups=options.get("groups", 1))
    tracked = mt.tensor(x, requires_grad=True)
    y = layer(tracked)
    wanted = naive(x, w, b)
    assert y.shape == wanted.shape and y.dtype == np.float64
    np.testing.assert_allclose(y.numpy(), wanted, rtol=1e-12, atol=1e-12)
    ct = random(1).standard_normal(wanted.shape)
    (y * ct).sum().backward()
    # Convolution is linear in each argument: its gradient along any direction is the naive one of that direction.
    for seed in range(3):
        direction = random(10 + seed)
        dx, dw = direction.standard_normal(x.shape), direction.standard_normal(w.shape)
        assert math.isclose((tracked.grad.numpy() * dx).sum(), (ct * naive(dx, w, None)).sum(), abs_tol=1e-10)
        assert math.isclose((layer.weight.grad.numpy() * dw).sum(), (ct * naive(x, dw, None)).sum(), abs_tol=1e-10)
    if b is not None:
        np.testing.assert_allclose(layer.bias.grad.numpy(), ct.sum(axis=(0, *range(2, ct.ndim))), atol=1e-12)


@pytest.mark.parametrize("options", [{"padding": 1}, {"stride": 2, "groups": 2}, {"dilation": 2}], ids=str)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_how_many_samples_are_at_work_at_a_time_changes_no_bit(dtype, options, monkeypatch):
    mt.manual_seed(3)
    layer = nn.Conv2d(4, 8, 3, dtype=dtype, **options)
    x = random(0).standard_normal((7, 4, 9, 8)).astype(dtype)

    def passes():
        layer.zero_grad()
        tracked = mt.tensor(x, requires_grad=True)
        y = layer(tracked)
        (y * y).sum().backward()
        return [array.numpy().copy() for array in (y.detach(), tracked.grad, layer.weight.grad, layer.bias.grad)]
    at_once = passes()
    made = (4 * 3 * 3 + 8) * math.prod(at_once[0].shape[2:])
    for samples in (1, 2.5, 6):
        monkeypatch.setattr(convolution, "AT_A_TIME", samples * made * at_once[0].itemsize)
        for one, other in zip(at_once, passes(), strict=True):
            np.testing.assert_array_equal(one, other, strict=True)


def test_initial_values_and_what_is_printed():
    mt.manual_seed(0)
    layer = nn.Conv2d(6, 50, (3, 5), stride=2, groups=2)
    assert layer.weight.shape == (50, 3, 3, 5) and layer.bias.shape == (50,)
    bound = 1 / math.sqrt(3 * 3 * 5)
    for p in layer.parameters():
        assert p.dtype == np.float32 and 0.8 * bound < np.abs(p.numpy()).max() <= bound
    assert repr(layer) == "Conv2d(6, 50, (3, 5), stride=2, groups=2)"
    assert repr(nn.Conv1d(2, 4, 3, padding=1, bias=False)) == "Conv1d(2, 4, (3,), padding=1, bias=False)"
    he = nn.Conv2d(8, 400, 3, weight_init=nn.init.he_normal)
    assert not he.bias.numpy().any() and abs(he.weight.numpy().std() - math.sqrt(2 / 72)) < 0.003


@pytest.mark.parametrize(("channels", "groups"), [((4, 8), 3), ((6, 8), 3), ((8, 6), 3)])
def test_groups_must_divide_the_channels(channels, groups):
    with pytest.raises(ValueError, match="3 groups"):
        nn.Conv2d(*channels, 3, groups=groups)


def test_an_input_of_other_channels_or_too_small():
    with pytest.raises(ValueError, match="channels"):
        nn.Conv2d(3, 4, 3)(mt.tensor(np.ones((2, 4, 5, 5)), dtype=np.float32))
    with pytest.raises(ValueError, match="doesn't fit"):
        nn.Conv2d(3, 4, 6)(mt.tensor(np.ones((2, 3, 5, 5)), dtype=np.float32))


# ---------------------------------------------------------------- pooling

def pooled(x, kernel, stride, padding, combine, filler):
    x = np.pad(x, [(0, 0), (0, 0), (padding, padding), (padding, padding)], constant_values=filler)
    h, w = ((e - kernel) // stride + 1 for e in x.shape[2:])
    y = np.empty((*x.shape[:2], h, w))
    for i, j in itertools.product(range(h), range(w)):
        y[:, :, i, j] = combine(x[:, :, i * stride:i * stride + kernel, j * stride:j * stride + kernel], axis=(2, 3))
    return y


POOLS = [(2, None, 0), (3, 2, 0), (3, 1, 1), (2, 3, 1), (3, 3, 0)]
POOL_SHAPES = [(2, 3, 7, 8), (1, 1, 6, 6), (0, 2, 5, 5)]


@pytest.mark.parametrize(("kernel", "stride", "padding"), POOLS)
@pytest.mark.parametrize("shape", POOL_SHAPES, ids=str)
@pytest.mark.parametrize("kind", [nn.MaxPool2d, nn.AvgPool2d])
def test_pooling_and_its_gradient(kind, kernel, stride, padding, shape):
    combine, filler = (np.max, -np.inf) if kind is nn.MaxPool2d else (np.mean, 0.0)
    x = random(2).permutation(math.prod(shape)).reshape(shape) / 7.0        # no ties: a step of 1e-4 changes no maximum
    layer = kind(kernel, stride, padding)

    def naive(x):
        return pooled(x, kernel, stride or kernel, padding, combine, filler)
    tracked = mt.tensor(x, requires_grad=True)
    y = layer(tracked)
    np.testing.assert_allclose(y.numpy(), naive(x), rtol=1e-13)
    ct = random(3).standard_normal(y.shape)
    (y * ct).sum().backward()
    for seed in range(3):
        d = random(20 + seed).uniform(-1, 1, x.shape)
        slope = (ct * (naive(x + 1e-4 * d) - naive(x - 1e-4 * d))).sum() / 2e-4
        assert math.isclose((tracked.grad.numpy() * d).sum(), slope, rel_tol=1e-8, abs_tol=1e-8)


@pytest.mark.parametrize(("kernel", "stride", "padding"), POOLS)
def test_ties_share_the_gradient(kernel, stride, padding):
    """Whole numbers of a small range tie often. The share of each place, counted window by window."""
    x = random(4).integers(0, 3, (2, 2, 7, 7)).astype(np.float64)
    tracked = mt.tensor(x, requires_grad=True)
    y = nn.MaxPool2d(kernel, stride, padding)(tracked)
    ct = random(5).standard_normal(y.shape)
    (y * ct).sum().backward()
    wide = np.pad(x, [(0, 0), (0, 0), (padding, padding), (padding, padding)], constant_values=-np.inf)
    wanted = np.zeros_like(wide)
    for n, c, i, j in np.ndindex(y.shape):
        s = stride or kernel
        window = (n, c, slice(i * s, i * s + kernel), slice(j * s, j * s + kernel))
        best = wide[window] == wide[window].max()
        wanted[window] += ct[n, c, i, j] * best / best.sum()
    wanted = wanted[:, :, padding:7 + padding, padding:7 + padding]
    np.testing.assert_allclose(tracked.grad.numpy(), wanted, atol=1e-12)


def test_pooling_of_nan_and_float32():
    x = np.ones((1, 1, 4, 4), np.float32)
    x[0, 0, 1, 1] = np.nan
    y = nn.MaxPool2d(2)(mt.tensor(x)).numpy()
    assert y.dtype == np.float32 and np.isnan(y[0, 0, 0, 0]) and not np.isnan(y[0, 0, 1]).any()


def test_reshape():
    assert nn.Reshape(1, 4)(mt.tensor(np.zeros((3, 4)))).shape == (3, 1, 4)
    assert nn.Reshape(2, 2)(mt.tensor(np.zeros((0, 4)))).shape == (0, 2, 2)
