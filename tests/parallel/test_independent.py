"""Data parallelism against a sum that knows neither trees nor buckets nor ranks: math.fsum over single samples."""

import math

import numpy as np
import pytest

from minitorch_dist import backend, nn
from tests.crews import crews

from . import cases, plain

STEPS, LR, MOMENTUM, CLIP, SEED = 12, 0.02, 0.9, 0.3, 3


add_up = lambda arrays: np.vectorize(lambda *terms: math.fsum(terms))(*arrays)


def one_sample_at_a_time():
    """SGD with momentum (nesterov, weight decay) and clipping in plain NumPy float64, as cases.OPTIMIZERS' "momentum";
    dropout's masks are those of each sample's place in the global batch."""
    model = cases.model_with_dropout(np.float64)
    params = dict(model.named_parameters())
    values = {name: p.numpy().copy() for name, p in params.items()}
    velocity = {name: np.zeros_like(v) for name, v in values.items()}
    x, labels = plain.dataset()
    loader = cases.loader_for(np.float64)
    clipped = 0
    for step in range(STEPS):
        epoch, at = divmod(step, len(loader))
        rows = list(loader.sampler.epoch(epoch))[at]
        singles = []
        for place, row in enumerate(rows):
            model.load_state_dict(values)
            model.zero_grad()
            with backend.random_scope(SEED, step, len(rows), (place, place + 1), 8):
                nn.cross_entropy(model(x[row:row + 1]), labels[row:row + 1], reduction="sum").backward()
            singles.append({name: p.grad.numpy().copy() for name, p in params.items()})
        grads = {name: add_up([s[name] for s in singles]) / len(rows) for name in values}
        norm = math.sqrt(math.fsum(float(g) ** 2 for v in grads.values() for g in v.ravel()))
        if norm > CLIP:
            clipped += 1
            grads = {name: g * (CLIP / (norm + 1e-6)) for name, g in grads.items()}
        for name in values:
            g = grads[name] + 1e-3 * values[name]
            velocity[name] = g if step == 0 else MOMENTUM * velocity[name] + g
            values[name] = values[name] - LR * (g + MOMENTUM * velocity[name])
    assert 0 < clipped and any(len(rows) % 4 for rows in loader.sampler.epoch(0))
    return values


@pytest.fixture(scope="module")
def independent():
    return one_sample_at_a_time()


@pytest.mark.parametrize("n", [1, 3, 4])
def test_dropout_clipping_and_uneven_shards(n, independent):
    for name, tolerance in (("plain", 1e-12), ("exact", 1e-12), ("float32", 2e-5)):
        if name == "exact" and n == 3:
            continue
        for got in crews.call("tests.parallel.cases:against_independent", n, (name, STEPS, CLIP, SEED)):
            for key, value in independent.items():
                np.testing.assert_allclose(got[key], value, rtol=0, atol=tolerance, err_msg=f"{name}, {key}")
