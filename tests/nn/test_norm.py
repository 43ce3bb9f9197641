"""Normalisation layers against closed forms in plain NumPy float64, with central differences for the gradients."""

import math

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import nn
from minitorch_dist.autodiff.check import check_grads

from .test_layers import slopes

random = np.random.default_rng


def draw(layer):
    """Weights and biases that are neither one nor zero."""
    for i, p in enumerate(layer.parameters()):
        with mt.no_grad():
            p[...] = random(40 + i).uniform(0.5, 2.0, p.shape)
    return layer


def layer_norm(x, w, b, axes, eps):
    m = x.mean(axis=axes, keepdims=True)
    return (x - m) / np.sqrt(((x - m) ** 2).mean(axis=axes, keepdims=True) + eps) * w + b


CASES = {
    "layer": (lambda: nn.LayerNorm(5, dtype=np.float64), lambda x, w, b: layer_norm(x, w, b, (-1,), 1e-5)),
    "layer, two axes": (lambda: nn.LayerNorm((3, 5), eps=0.1, dtype=np.float64),
                        lambda x, w, b: layer_norm(x, w, b, (-2, -1), 0.1)),
    "rms": (lambda: nn.RMSNorm(5, dtype=np.float64),
            lambda x, w: x / np.sqrt((x ** 2).mean(axis=-1, keepdims=True) + 1e-6) * w),
    "rms, two axes": (lambda: nn.RMSNorm((3, 5), eps=0.2, dtype=np.float64),
                      lambda x, w: x / np.sqrt((x ** 2).mean(axis=(-2, -1), keepdims=True) + 0.2) * w),
    "group, all channels": (lambda: nn.GroupNorm(1, 3, dtype=np.float64),
                            lambda x, w, b: layer_norm(x, w[:, None], b[:, None], (1, 2), 1e-5)),
    "group, one channel": (lambda: nn.GroupNorm(3, 3, eps=0.1, dtype=np.float64),
                           lambda x, w, b: layer_norm(x, w[:, None], b[:, None], 2, 0.1)),
    "batch": (lambda: nn.BatchNorm(3, dtype=np.float64),
              lambda x, w, b: layer_norm(x, w[:, None], b[:, None], (0, 2), 1e-5)),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    make, closed = CASES[name]
    layer = draw(make())
    weights = [p.numpy().copy() for p in layer.parameters()]
    x = random(0).standard_normal((4, 3, 5)) * 3 + 1
    tracked = mt.tensor(x, requires_grad=True)
    y = layer(tracked)
    np.testing.assert_allclose(y.numpy(), closed(x, *weights), rtol=1e-12, atol=1e-12)
    ct = random(1).standard_normal(x.shape)
    (y * ct).sum().backward()
    np.testing.assert_allclose(tracked.grad.numpy(), slopes(lambda x: closed(x, *weights), x, ct), rtol=1e-6, atol=1e-7)
    for i, p in enumerate(layer.parameters()):
        def f(w, i=i):
            return closed(x, *weights[:i], w, *weights[i + 1:])
        np.testing.assert_allclose(p.grad.numpy(), slopes(f, weights[i], ct), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("make", [lambda: nn.LayerNorm(4), lambda: nn.RMSNorm(4), lambda: nn.BatchNorm(4),
                                  lambda: nn.GroupNorm(2, 4)])
def test_float32_stays_float32(make):
    layer = make()
    x = mt.tensor(random(0).standard_normal((6, 4)).astype(np.float32), requires_grad=True)
    y = layer(x)
    (y * y).sum().backward()
    assert y.dtype == x.grad.dtype == np.float32 and all(b.dtype == np.float32 for _, b in layer.named_buffers())
    assert layer.eval()(x).dtype == np.float32


def test_groups_in_float16_whose_gradients_times_the_weight_are_beyond_its_range():
    """200 · 500: what is left of it behind the division by a deviation of 2,500 is float64's."""
    layer, ends = nn.GroupNorm(2, 4), []
    x, ct = random(0).standard_normal((3, 4, 5)) * 2500, random(1).choice([-200.0, 200.0], (3, 4, 5))
    for dtype in (np.float16, np.float64):
        layer.to(dtype)
        layer.weight.data[...] = 500
        leaf = mt.tensor(x.astype(np.float16).astype(dtype), requires_grad=True)
        y = layer(leaf)
        y.backward(mt.tensor(ct.astype(dtype)))
        ends.append([y.numpy(), leaf.grad.numpy()])
    for got, exact in zip(*ends, strict=True):
        assert got.dtype == np.float16 and np.linalg.norm(got - exact) < 1e-3 * np.linalg.norm(exact)


@pytest.mark.parametrize("shape", [(5, 6), (5, 6, 3), (2, 6, 3, 5), (0, 6, 2)], ids=str)
def test_groups_of_channels(shape):
    layer = draw(nn.GroupNorm(3, 6, dtype=np.float64))
    w, b = (p.numpy() for p in layer.parameters())
    x = random(0).standard_normal(shape) * 3 + 1
    pairs = np.stack([x[:, 0::2], x[:, 1::2]])      # channels 0 and 1, 2 and 3, 4 and 5
    axes = (0, *range(3, len(shape) + 1))
    y = (pairs - pairs.mean(axes, keepdims=True)) / np.sqrt(pairs.var(axes, keepdims=True) + 1e-5)
    column = (-1, *(1,) * (len(shape) - 2))
    wanted = np.empty(shape)
    wanted[:, 0::2], wanted[:, 1::2] = y
    wanted = wanted * w.reshape(column) + b.reshape(column)
    for f in (layer, mt.compile(layer)):
        np.testing.assert_allclose(f(mt.tensor(x)).numpy(), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("act, words", [
    (lambda: nn.GroupNorm(4, 6), "4 groups must divide 6 channels"), (lambda: nn.GroupNorm(0, 6), "num_groups=0"),
    (lambda: nn.GroupNorm(2, 6)(mt.ones(4, 5, 6)), r"of 6 channels was given an input of shape \(4, 5, 6\)"),
    (lambda: nn.GroupNorm(2, 6)(mt.ones(6)), r"of shape \(6,\)")], ids=["groups", "none", "channels", "axes"])
def test_groups_that_cannot_be(act, words):
    with pytest.raises(ValueError, match=words):
        act()


def test_what_is_printed():
    assert repr(nn.GroupNorm(2, 6)) == "GroupNorm(2, 6)"
    assert repr(nn.LayerNorm((3, 5))) == "LayerNorm(3, 5)" and repr(nn.BatchNorm(7)) == "BatchNorm(7)"


# ---------------------------------------------------------------- batch norm's running statistics

@pytest.mark.parametrize("shape", [(6, 3), (2, 3), (4, 3, 5), (3, 3, 2, 4)], ids=str)
def test_running_statistics(shape):
    layer = nn.BatchNorm(3, momentum=0.3, dtype=np.float64)
    mean, var = np.zeros(3), np.ones(3)
    axes = (0, *range(2, len(shape)))
    for step in range(4):
        x = random(step).standard_normal(shape) * (step + 1) + step
        layer(mt.tensor(x))
        mean = 0.7 * mean + 0.3 * x.mean(axis=axes)
        var = 0.7 * var + 0.3 * x.var(axis=axes, ddof=1)
    np.testing.assert_allclose(layer.running_mean, mean, rtol=1e-12)
    np.testing.assert_allclose(layer.running_var, var, rtol=1e-12)


def test_evaluation_uses_and_keeps_the_running_statistics():
    layer = draw(nn.BatchNorm(3, dtype=np.float64))
    layer(mt.tensor(random(0).standard_normal((8, 3, 2)) * 2 + 5))
    before = {name: b.copy() for name, b in layer.named_buffers()}
    assert list(before) == ["running_mean", "running_var"]
    w, b = (p.numpy().copy() for p in layer.parameters())
    layer.eval()
    m, v = before.values()

    def closed(x):
        return (x - m[:, None]) / np.sqrt(v[:, None] + 1e-5) * w[:, None] + b[:, None]
    for n in (1, 5):        # a batch of one sample is nothing special
        x = random(n).standard_normal((n, 3, 2))
        tracked = mt.tensor(x, requires_grad=True)
        y = layer(tracked)
        np.testing.assert_allclose(y.numpy(), closed(x), rtol=1e-12)
        ct = random(9).standard_normal(x.shape)
        (y * ct).sum().backward()
        np.testing.assert_allclose(tracked.grad.numpy(), slopes(closed, x, ct), rtol=1e-7, atol=1e-8)
    assert all((before[name] == b).all() for name, b in layer.named_buffers())


def test_second_derivatives_of_batch_norm():
    x = random(0).standard_normal((4, 2, 3))

    def f(x, w, b):
        return mt.batch_norm(x, w, b)
    check_grads(f, (x, random(1).uniform(0.5, 2, 2), random(2).standard_normal(2)))


def test_state_goes_with_the_model():
    layer = draw(nn.BatchNorm(3))
    layer(mt.tensor(random(0).standard_normal((8, 3)).astype(np.float32)))
    state = layer.state_dict()
    assert set(state) == {"weight", "bias", "running_mean", "running_var"}
    twin = nn.BatchNorm(3)
    twin.load_state_dict(state)
    x = mt.tensor(random(1).standard_normal((5, 3)).astype(np.float32))
    assert (twin.eval()(x).numpy() == layer.eval()(x).numpy()).all()
    layer.train()(x)
    assert (twin.running_mean == state["running_mean"]).all(), "the copy shares memory with the original"


@pytest.mark.parametrize(("shape", "words"), [((1, 3), "2 or more"), ((4, 5), "channels are the second axis")])
def test_what_batch_norm_refuses(shape, words):
    with pytest.raises(ValueError, match=words):
        nn.BatchNorm(3)(mt.tensor(np.ones(shape, np.float32)))


def test_a_constant_channel_gives_the_bias():
    layer = draw(nn.BatchNorm(2, dtype=np.float64))
    y = layer(mt.tensor(np.full((4, 2), 7.0)))
    np.testing.assert_allclose(y.numpy(), np.broadcast_to(layer.bias.numpy(), (4, 2)))
    assert math.isfinite(layer.running_var.sum())


def test_a_batch_of_nothing_moves_nothing_and_gives_zeros_as_gradients():
    layer = nn.BatchNorm(3)
    before = layer.running_var.copy()
    y = layer(np.zeros((0, 3, 4), np.float32))
    y.sum().backward()
    assert y.shape == (0, 3, 4) and np.array_equal(layer.running_var, before)
    assert layer.weight.grad.tolist() == layer.bias.grad.tolist() == [0.0] * 3


def test_a_checkpointed_batch_norm_moves_its_statistics_once():
    """Running the block again in backward is no second batch."""
    x = np.random.default_rng(0).standard_normal((7, 3)).astype(np.float32)
    plain, checkpointed = nn.BatchNorm(3), nn.BatchNorm(3)
    plain(mt.tensor(x, requires_grad=True)).sum().backward()
    mt.checkpoint(checkpointed)(mt.tensor(x, requires_grad=True)).sum().backward()
    np.testing.assert_array_equal(checkpointed.running_mean, plain.running_mean)
    np.testing.assert_array_equal(checkpointed.running_var, plain.running_var)
    np.testing.assert_array_equal(checkpointed.weight.grad.numpy(), plain.weight.grad.numpy())
