"""µP and the gradient noise scale on a GPU (the stand-in): what they are on the host."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import nn, optim
from minitorch_dist.optim import mup
from minitorch_dist.parallel.noise_scale import GradientNoiseScale

from .fake_cupy import installed


@pytest.fixture(autouse=True)
def gpu():
    with installed() as cupy:
        yield cupy


def trained(device):
    """(trace, square, the parameters on the host) after three steps of two passes."""
    mt.manual_seed(2)
    model, base = (nn.GPT(11, 6, layers=1, heads=2, dim=dim).to(device) for dim in (16, 8))
    optimizer, noise = mup.scale(model, base).optimizer(optim.SGD, model, 0.1), GradientNoiseScale(model)
    for step in range(3):
        tokens = np.random.default_rng(step).integers(0, 11, (5, 7))
        optimizer.zero_grad()
        for rows in (slice(2), slice(2, 5)):
            batch = mt.backend.to(tokens[rows], device)
            (nn.cross_entropy(model(batch[:, :-1]), batch[:, 1:], reduction="sum") / 30).backward()
            noise.after_backward(len(tokens[rows]))
        noise.update()
        optimizer.step()
    return noise.trace, noise.square, {name: mt.backend.to(p.data, "cpu") for name, p in model.named_parameters()}


def test_the_hosts_numbers(gpu):
    (trace, square, wanted), (*found, there) = trained("cpu"), trained("cuda")
    np.testing.assert_allclose(found, (trace, square), rtol=1e-5)
    for name, values in wanted.items():
        np.testing.assert_allclose(there[name], values, rtol=1e-5, atol=1e-7, err_msg=name)
