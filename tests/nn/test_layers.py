"""Layers against closed forms in float64, their gradients against central differences; initial values; dropout."""

import math

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import nn
from minitorch_dist.backend import random_scope

LAYERS = {      # layer -> closed form, on inputs away from the kink at 0
    "relu": (nn.ReLU(), lambda x: np.where(x > 0, x, 0)),
    "tanh": (nn.Tanh(), lambda x: (np.exp(2 * x) - 1) / (np.exp(2 * x) + 1)),
    "sigmoid": (nn.Sigmoid(), lambda x: 0.5 * (1 + np.tanh(x / 2))),
    "leaky": (nn.LeakyReLU(), lambda x: np.where(x > 0, x, 0.01 * x)),
    "leaky 0.3": (nn.LeakyReLU(0.3), lambda x: np.where(x > 0, x, 0.3 * x)),
    "gelu": (nn.GELU("tanh"), lambda x: x / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))),
}


def inputs(shape, seed=0):
    x = np.random.default_rng(seed).standard_normal(shape)
    return np.where(np.abs(x) < 0.05, 0.5, x)


def slopes(f, x, ct, h=1e-6):
    """Central differences of sum(ct · f(x)) by each element of x."""
    out = np.empty_like(x)
    for i in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[i] = h
        out[i] = (ct * (f(x + step) - f(x - step))).sum() / (2 * h)
    return out


@pytest.mark.parametrize("name", LAYERS)
def test_elementwise_layers(name):
    layer, closed = LAYERS[name]
    values = inputs((3, 5, 2))
    x = mt.tensor(values, requires_grad=True)
    y = layer(x)
    np.testing.assert_allclose(y.numpy(), closed(values), rtol=1e-12, atol=1e-12)
    ct = np.random.default_rng(1).standard_normal(values.shape)
    (y * ct).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), slopes(closed, values, ct), rtol=1e-7, atol=1e-8)
    narrow = layer(mt.tensor(values.astype(np.float32)))
    assert narrow.dtype == np.float32
    np.testing.assert_allclose(narrow.numpy(), closed(values), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(4, 5), (5,), (2, 3, 5), (0, 5)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_linear(shape, bias):
    layer = nn.Linear(5, 3, bias=bias, dtype=np.float64)
    w = layer.weight.numpy().copy()
    b = layer.bias.numpy().copy() if bias else np.zeros(3)

    def closed(x, w=w, b=b):
        return np.einsum("...i,oi->...o", x, w) + b
    values, ct = inputs(shape), np.random.default_rng(2).standard_normal((*shape[:-1], 3))
    x = mt.tensor(values, requires_grad=True)
    y = layer(x)
    assert y.shape == (*shape[:-1], 3) and y.dtype == np.float64
    np.testing.assert_allclose(y.numpy(), closed(values), rtol=1e-12, atol=1e-12)
    (y * ct).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), slopes(closed, values, ct), rtol=1e-7, atol=1e-8)
    np.testing.assert_allclose(layer.weight.grad.numpy(), slopes(lambda w: closed(values, w=w), w, ct), atol=1e-8)
    if bias:
        np.testing.assert_allclose(layer.bias.grad.numpy(), slopes(lambda b: closed(values, b=b), b, ct), atol=1e-8)


def test_flatten():
    x = inputs((4, 2, 3))
    assert (nn.Flatten()(mt.tensor(x)).numpy() == np.array([row.ravel() for row in x])).all()
    assert nn.Flatten()(mt.tensor(x[:, 0, 0])).shape == (4, 1)
    assert nn.Flatten()(mt.tensor(x[:0])).shape == (0, 6)


# ---------------------------------------------------------------- initial values

@pytest.mark.parametrize(("make", "variance", "bound"), [
    (nn.init.he_normal, lambda i, o: 2 / i, None),
    (nn.init.he_uniform, lambda i, o: 2 / i, lambda i, o: math.sqrt(6 / i)),
    (nn.init.xavier_normal, lambda i, o: 2 / (i + o), None),
    (nn.init.xavier_uniform, lambda i, o: 2 / (i + o), lambda i, o: math.sqrt(6 / (i + o))),
    (nn.init.torch_linear, lambda i, o: 1 / (3 * i), lambda i, o: 1 / math.sqrt(i)),
])
@pytest.mark.parametrize("shape", [(300, 200), (64, 32, 5, 3)], ids=str)
def test_initial_values_have_the_papers_variance(make, variance, bound, shape):
    mt.manual_seed(7)
    field = math.prod(shape[2:])
    fans = shape[1] * field, shape[0] * field
    w = make(shape, np.float64)
    assert w.shape == shape and w.dtype == np.float64 and make((2, 3)).dtype == np.float32
    spread = 6 * math.sqrt(2 / w.size)      # six standard deviations of a normal sample's variance
    assert abs(w.var() / variance(*fans) - 1) < spread
    assert abs(w.mean()) < 6 * math.sqrt(variance(*fans) / w.size)
    if bound:
        assert 0.99 * bound(*fans) < np.abs(w).max() <= bound(*fans)
    else:
        assert abs((np.abs(w) < w.std()).mean() - 0.6827) < 0.02      # a normal, not a uniform


def test_initial_values_depend_on_the_seed_and_the_order_alone():
    def values(seed):
        mt.manual_seed(seed)
        return [p.numpy().copy() for p in nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).parameters()]
    assert all((a == b).all() for a, b in zip(values(1), values(1), strict=True))
    assert not any((a == b).any() for a, b in zip(values(1), values(2), strict=True))
    assert (values(1)[0] != values(1)[2]).all()


def test_a_linear_layer_starts_as_documented():
    mt.manual_seed(0)
    layer = nn.Linear(400, 300)
    assert 0.99 / 20 < np.abs(layer.weight.numpy()).max() <= 1 / 20
    assert 0.9 / 20 < np.abs(layer.bias.numpy()).max() <= 1 / 20
    assert (nn.Linear(4, 3, weight_init=nn.init.he_normal).bias.numpy() == 0).all()
    with pytest.raises(ValueError, match=r"\(3,\)"):
        nn.init.he_normal((3,))


# ---------------------------------------------------------------- dropout

def test_dropout_is_off_in_evaluation_and_at_p_0():
    x = mt.tensor(inputs((3, 4)))
    assert nn.Dropout(0.5).eval()(x) is x
    assert nn.Dropout(0.0)(x) is x
    for p in (1, -0.1, 1.5):
        with pytest.raises(ValueError, match=str(p)):
            nn.Dropout(p)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_drops_the_share_and_scales_the_rest(p, dtype):
    mt.manual_seed(3)
    ones = mt.tensor(np.ones((300, 211), dtype), requires_grad=True)
    y = nn.Dropout(p)(ones)
    assert y.dtype == dtype
    kept = y.numpy() != 0
    np.testing.assert_allclose(y.numpy()[kept], 1 / (1 - p), rtol=4 * np.finfo(dtype).eps)
    assert abs(kept.mean() - (1 - p)) < 6 * math.sqrt(p * (1 - p) / kept.size)
    ct = np.random.default_rng(0).standard_normal(y.shape).astype(dtype)
    (y * ct).sum().backward()
    np.testing.assert_allclose(ones.grad.numpy(), np.where(kept, ct / dtype(1 - p), 0), rtol=4 * np.finfo(dtype).eps)
    assert (nn.Dropout(p)(ones).numpy() != y.numpy()).any()


def test_masks_of_shards_are_pieces_of_the_whole_batchs():
    model = nn.Sequential(nn.Dropout(0.4), nn.Tanh(), nn.Sequential(nn.Dropout(0.4)))
    x = inputs((13, 6))

    def run(lo, hi, step=5, module=model):
        with random_scope(seed=1, step=step, count=13, rows=(lo, hi)):
            return module(mt.tensor(x[lo:hi])).numpy().copy()
    whole = run(0, 13)
    for ranks in (2, 3, 4, 8):
        edges = [13 * r // ranks for r in range(ranks + 1)]
        assert (np.concatenate([run(*e) for e in zip(edges, edges[1:], strict=False)]) == whole).all()
    assert ((run(0, 13, step=6) == 0) != (whole == 0)).any()
    first, second = (run(0, 13, module=nn.Sequential(*layers)) == 0
                     for layers in ([nn.Dropout(0.4)], [nn.Tanh(), nn.Dropout(0.4)]))
    assert (first != second).any(), "two layers at different paths have one mask"
    shared = nn.Dropout(0.4)
    once, twice = run(0, 13, module=nn.Sequential(shared)) == 0, run(0, 13, module=nn.Sequential(shared, shared)) == 0
    assert twice.sum() > once.sum(), "the second call repeats the first one's mask"
