"""Lion against its paper's algorithm in NumPy's float64, and what it promises: steps of one length, half of Adam's
state."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import ledger, nn, optim
from minitorch_dist.optim.optimizer import TILE
from minitorch_dist.parallel import full_state_dict, fully_shard

from .test_optimizers import gradients, leaves, start

SHAPES = [(7, 11), (233, 331), (), (0, 3), (2, 3, 5)]
assert 233 * 331 > 2 * TILE and 233 * 331 % TILE


def by_paper(p, m, g, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
    """Algorithm 2 of Chen et al. 2023: (p, m) behind a step."""
    c = betas[0] * m + (1 - betas[0]) * g
    return p - lr * (np.sign(c) + weight_decay * p), betas[1] * m + (1 - betas[1]) * g


@pytest.mark.parametrize("settings", [
    {}, {"lr": 0.01, "weight_decay": 0.5}, {"lr": 2e-3, "betas": (0.5, 0.75)},
    {"lr": 1e-3, "betas": (0, 0.9)}], ids=str)
def test_fifty_steps_are_the_papers(settings):
    values = start(SHAPES)
    wanted, params = [(np.asarray(v), np.zeros_like(v)) for v in values], leaves(values, np.float64)
    optimizer = optim.Lion(params, **settings)
    for step in range(50):
        grads = gradients(step, SHAPES, np.float64)
        wanted = [by_paper(p, m, g, **settings) for (p, m), g in zip(wanted, grads, strict=True)]
        for p, g in zip(params, grads, strict=True):
            p.grad = mt.tensor(g)
        optimizer.step()
    for p, v, (theirs, _) in zip(params, values, wanted, strict=True):
        np.testing.assert_allclose(p.numpy(), theirs, rtol=0, atol=1e-13)
        assert p.size == 0 or abs(p.numpy() - v).max() >= 2 * optimizer.lr


def test_it_is_the_sign_of_a_gradient_that_counts():
    """Gradients 2¹⁰ times as large, or as small: the same bits. And each element goes just lr."""
    found = []
    for scale in (1, 2.0 ** 10, 2.0 ** -10):
        params = leaves([np.zeros((5, 70))], np.float32)
        optimizer = optim.Lion(params, lr=0.25)
        for step in range(4):
            params[0].grad = mt.tensor(gradients(step, [(5, 70)])[0] * np.float32(scale))
            optimizer.step()
            if step == 0:
                assert (abs(params[0].numpy()) == 0.25).all()
        found.append(params[0].numpy().tobytes())
    assert len(set(found)) == 1


@pytest.mark.parametrize(("bits", "bytes_each"), [(32, 4), (8, 1.25)])
def test_its_state_is_half_of_adams(bits, bytes_each):
    taken = {}
    for kind in (optim.Lion, optim.AdamW):
        model = nn.Linear(64, 48)
        with ledger.record(memory=True) as book:
            optimizer = kind(model.parameters(), state_bits=bits)
            model(mt.tensor(np.ones((3, 64), np.float32))).sum().backward()
            optimizer.step()
            taken[kind] = book.live["optimizer"]
    assert taken[optim.AdamW] == 2 * taken[optim.Lion] and taken[optim.Lion] >= 64 * 48 * bytes_each
    assert taken[optim.Lion] <= (64 * 48 + 48 + 2 * 16) * bytes_each * 1.4      # padding


@pytest.mark.parametrize("stage", [1, 3])
def test_it_updates_pieces(stage):
    """A step of an element needs that element alone."""
    found = []
    for sharded in (False, True):
        mt.manual_seed(2)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        wrapped = fully_shard(model, stage=stage) if sharded else model
        optimizer = optim.Lion(wrapped.parameters(), lr=0.01, weight_decay=0.1)
        for step in range(3):
            x = np.random.default_rng(step).standard_normal((4, 6)).astype("f4")
            mt.sum(mt.square(wrapped(x))).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append({name: value.tobytes() for name, value in
                      (full_state_dict(wrapped) if sharded else model.state_dict()).items()})
    assert found[0] == found[1]
