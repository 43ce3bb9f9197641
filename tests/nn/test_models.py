"""The models for images: sizes, shapes, pieces, gradients, and state that goes from one to another."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import nn
from minitorch_dist.backend import random_scope

from .test_conv import convolve, pooled

random = np.random.default_rng
f8 = np.float64


class Residual(nn.Module):
    """Images through two residual blocks; ResidualBlock itself takes no flat images."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(nn.Reshape(1, 28, 28), nn.AvgPool2d(4), nn.ResidualBlock(1, 3, 2, dtype=f8),
                                    nn.ResidualBlock(3, 3, dtype=f8), nn.Flatten(), nn.Linear(48, 10, dtype=f8))

    def forward(self, x):
        return self.blocks(x)


MODELS = {
    "mlp": lambda: nn.mlp((9, 7), 0.0, f8),
    "lenet": lambda: nn.lenet(0.0, f8),
    "patches": lambda: nn.ImageTransformer("patches", 2, 2, 8, dtype=f8),
    "rows": lambda: nn.ImageTransformer("rows", 1, 4, 8, dtype=f8),
    "residual": Residual,
}


def images(n, seed=0):
    return random(seed).uniform(0, 1, (n, 784))


def test_sizes():
    def count(model):
        return sum(p.size for p in model.parameters())
    assert count(nn.lenet()) == 61_706                      # LeCun et al. 1998, with all maps of C3 connected
    assert count(nn.mlp((512, 512))) == 784 * 512 + 512 + 512 * 512 + 512 + 512 * 10 + 10
    block = 2 * 2 * 64 + (64 * 192 + 192) + (64 * 64 + 64) + (64 * 256 + 256) + (256 * 64 + 64)
    for pieces, places, size in [("patches", 16, 49), ("rows", 28, 28)]:
        wanted = size * 64 + 64 + places * 64 + 2 * block + 2 * 64 + 64 * 10 + 10
        assert count(nn.ImageTransformer(pieces)) == wanted
    assert count(nn.ResidualBlock(4, 8, 2)) == 4 * 8 * 9 + 8 * 8 * 9 + 4 * 8 + 4 * 8
    assert count(nn.ResidualBlock(8, 8)) == 2 * 8 * 8 * 9 + 4 * 8


@pytest.mark.parametrize("name", MODELS)
def test_shapes_and_state(name):
    mt.manual_seed(1)
    model = MODELS[name]()
    mt.manual_seed(2)
    twin = MODELS[name]()
    model(images(4))            # moves running statistics, if there are any
    model.eval(), twin.eval()
    x = images(3)
    assert model(x).shape == (3, 10) and model(x).dtype == f8
    assert np.abs(model(x).numpy() - twin(x).numpy()).max() > 1e-3
    twin.load_state_dict(model.state_dict())
    np.testing.assert_array_equal(twin(x).numpy(), model(x).numpy())
    np.testing.assert_allclose(model(x[:1]).numpy(), model(x).numpy()[:1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", [n for n in MODELS if n != "residual"])
def test_no_sample_gives_no_logits_and_no_gradient(name):
    """A micro-shard of a small batch may be empty."""
    model = MODELS[name]()
    y = model(images(0))
    assert y.shape == (0, 10)
    y.sum().backward()
    assert all(p.grad is None or not p.grad.numpy().any() for p in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_gradients_along_random_directions(name):
    mt.manual_seed(3)
    model = MODELS[name]()
    with mt.no_grad():      # biases of zeros would hide a wrong gradient; weights large enough to matter
        for i, p in enumerate(model.parameters()):
            p[...] = p.numpy() * 1.3 + 0.1 * random(i).standard_normal(p.shape)
    x, labels = images(3), np.array([7, 0, 4])

    def loss():
        return nn.cross_entropy(model(x), labels)
    loss().backward()
    start = {name: p.numpy().copy() for name, p in model.named_parameters()}
    grads = {name: p.grad.numpy().copy() for name, p in model.named_parameters()}
    for seed in range(3):
        direction = {name: random([seed, i]).standard_normal(v.shape) for i, (name, v) in enumerate(start.items())}
        ends = []
        for step in (1e-6, -1e-6):
            with mt.no_grad():
                for name, p in model.named_parameters():
                    p[...] = start[name] + step * direction[name]
                ends.append(loss().item())
        slope = sum((grads[name] * direction[name]).sum() for name in start)
        assert abs(slope) > 1e-3
        np.testing.assert_allclose(slope, (ends[0] - ends[1]) / 2e-6, rtol=1e-5)


def test_lenet_is_lenet():
    mt.manual_seed(5)
    model = nn.lenet(dtype=f8)
    w = [p.numpy() for p in model.parameters()]
    x = images(2)
    one = {"stride": (1, 1), "dilation": (1, 1), "groups": 1}
    h = x.reshape(2, 1, 28, 28)
    for i, padding in ((0, (2, 2)), (2, (0, 0))):
        h = np.maximum(convolve(h, w[i], w[i + 1], padding=padding, **one), 0)
        h = pooled(h, 2, 2, 0, np.max, -np.inf)
    assert h.shape == (2, 16, 5, 5)
    h = h.reshape(2, 400)
    for i in (4, 6, 8):
        h = h @ w[i].T + w[i + 1]
        h = np.maximum(h, 0) if i < 8 else h
    np.testing.assert_allclose(model(x).numpy(), h, rtol=1e-11, atol=1e-11)


def test_residual_block():
    mt.manual_seed(6)
    layer = nn.ResidualBlock(2, 4, stride=2, dtype=f8)
    x = random(0).standard_normal((3, 2, 6, 5))
    w = {name: p.numpy() for name, p in layer.named_parameters()}
    assert set(w) == {"conv1.weight", "norm1.weight", "norm1.bias", "conv2.weight", "norm2.weight", "norm2.bias",
                      "fit.weight"}

    def norm(y):
        m = y.mean(axis=(0, 2, 3), keepdims=True)
        return (y - m) / np.sqrt(y.var(axis=(0, 2, 3), keepdims=True) + 1e-5)
    one = {"dilation": (1, 1), "groups": 1}
    h = np.maximum(norm(convolve(x, w["conv1.weight"], None, (2, 2), (1, 1), **one)), 0)
    h = norm(convolve(h, w["conv2.weight"], None, (1, 1), (1, 1), **one))
    h = np.maximum(h + convolve(x, w["fit.weight"], None, (2, 2), (0, 0), **one), 0)
    assert h.shape == (3, 4, 3, 3)
    np.testing.assert_allclose(layer(mt.tensor(x)).numpy(), h, rtol=1e-11, atol=1e-11)
    same = nn.ResidualBlock(4, 4)
    assert same.fit is None and "fit" not in repr(same)


# ---------------------------------------------------------------- the image as a sequence

def test_pieces_are_the_right_pixels():
    x = np.arange(2 * 784.0).reshape(2, 784)
    picture = x.reshape(2, 28, 28)
    patches = nn.ImageTransformer("patches").cut(mt.tensor(x)).numpy()
    assert patches.shape == (2, 16, 49)
    for n in range(2):
        for row in range(4):
            for column in range(4):
                patch = picture[n, 7 * row:7 * row + 7, 7 * column:7 * column + 7]
                np.testing.assert_array_equal(patches[n, 4 * row + column], patch.ravel())
    np.testing.assert_array_equal(nn.ImageTransformer("rows").cut(mt.tensor(x)).numpy(), picture)
    with pytest.raises(ValueError, match="'columns'.*patches.*rows"):
        nn.ImageTransformer("columns")


def test_every_piece_and_its_place_count():
    mt.manual_seed(0)
    model = nn.ImageTransformer("patches", 1, 2, 8, dtype=f8)
    x = images(1)
    y = model(x).numpy()
    for piece in range(16):
        other = x.reshape(1, 4, 7, 4, 7).copy()
        other[:, piece // 4, :, piece % 4] = 1 - other[:, piece // 4, :, piece % 4]
        assert np.abs(model(other.reshape(1, 784)).numpy() - y).max() > 1e-4
    swapped = x.reshape(1, 4, 7, 4, 7).copy()[:, ::-1].reshape(1, 784)     # the same patches in other places
    assert np.abs(model(swapped).numpy() - y).max() > 1e-7


# ---------------------------------------------------------------- dropout

@pytest.mark.parametrize("make", [lambda: nn.lenet(0.5, f8), lambda: nn.mlp((20,), 0.5, f8),
                                  lambda: nn.ImageTransformer("patches", 1, 2, 8, 0.5, f8)],
                         ids=["lenet", "mlp", "transformer"])
def test_masks_belong_to_the_sample(make):
    """A batch in two parts meets the masks of the whole, whoever holds which rows; another step meets others."""
    mt.manual_seed(1)
    model = make()
    x = images(13)

    def run(step, *rows):
        with random_scope(3, step, 13, rows):
            return model(x[slice(*rows)]).numpy()
    whole = run(0, 0, 13)
    np.testing.assert_allclose(np.concatenate([run(0, 0, 5), run(0, 5, 13)]), whole, rtol=1e-9, atol=1e-12)
    assert np.abs(run(1, 0, 13) - whole).max() > 1e-3
    assert np.abs(model.eval()(x).numpy() - whole).max() > 1e-3
