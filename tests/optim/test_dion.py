"""Dion against its equations in plain NumPy, and against singular value decompositions."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import nn, optim
from minitorch_dist.optim.dion import RIGHT

from .test_muon import SHAPES, gradients, leaves, start

SETTINGS = [{"lr": 0.02}, {"lr": 0.01, "rank_fraction": 0.5, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.3},
            {"lr": 0.02, "rank_fraction": 0.1, "momentum": 0.0, "weight_decay": 0.0, "eps": 1e-3},
            {"lr": 0.02, "rank_fraction": 1, "right": "orthonormal", "seed": 5}]


def orthonormal(a):
    """Gram-Schmidt, twice, for rounding."""
    found = []
    for column in a.T:
        for _ in range(2):
            column = column - sum(((q @ column) * q for q in found), np.zeros(len(column)))
        found.append(column / np.linalg.norm(column))
    return np.stack(found, 1)


class Reference:
    """One matrix's, in float64, from the same Q."""

    def __init__(self, q, matrix, lr, rank_fraction=0.25, momentum=0.95, weight_decay=0.01, eps=1e-8, right="columns",
                 adjust_lr_fn=None, seed=0):
        self.q, self.matrix, self.m = q, matrix, 0.0
        self.lr, self.momentum, self.decay, self.eps = lr, momentum, weight_decay, eps
        self.right, self.adjust = right, adjust_lr_fn

    def step(self, x, g):
        b = self.m + g
        p = orthonormal(b @ self.q)
        r = b.T @ p
        self.m = b - (1 - self.momentum) * p @ r.T
        self.q = orthonormal(r) if self.right == "orthonormal" else r / (np.sqrt((r ** 2).sum(0)) + self.eps)
        rows, columns = x.shape if self.matrix else x.shape[::-1]
        scale = 0.2 * max(rows, columns) ** 0.5 if self.adjust == "match_rms_adamw" else max(1, rows / columns) ** 0.5
        return x - self.lr * self.decay * x - self.lr * scale * p @ self.q.T


def split(array):
    """A stack's matrices; of a matrix itself."""
    return array.reshape(-1, *array.shape[-2:])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("settings", SETTINGS)
def test_ten_steps_are_the_papers(settings, dtype):
    """From the second on, whose Q the first has left."""
    params = leaves(start(), dtype)
    optimizer = optim.Dion(params, **settings)
    references = None
    for step in range(11):
        if step == 1:
            state = optimizer.state_dict()["state"]
            wanted = [split(p.numpy().astype(np.float64)) for p in params]
            references = [[Reference(q.astype(np.float64), p.ndim == 2, **settings) for q in split(each["q"])]
                          for p, each in zip(params, state, strict=True)]
            for its, each in zip(references, state, strict=True):
                for one, m in zip(its, split(each["momentum_buffer"]), strict=True):
                    one.m = m.astype(np.float64)
        for k, (p, g) in enumerate(zip(params, gradients(step), strict=True)):
            p.grad = mt.tensor(g.astype(dtype))
            if step:
                wanted[k] = [one.step(x, d) for one, x, d in zip(
                    references[k], wanted[k], split(g.astype(dtype).astype(np.float64)), strict=True)]
        optimizer.step()
    tolerance = 1e-3 if dtype == np.float32 else 1e-9
    for p, w, its, each in zip(params, wanted, references, optimizer.state_dict()["state"], strict=True):
        assert p.dtype == dtype and each["q"].shape[-2:] == its[0].q.shape
        np.testing.assert_allclose(split(p.numpy()), np.stack(w), rtol=0, atol=0.02 * tolerance * 10)
        np.testing.assert_allclose(split(each["momentum_buffer"]), np.stack([one.m for one in its]), atol=tolerance)
        q, others = split(each["q"]), np.stack([one.q for one in its])      # of columns that P may have turned round
        np.testing.assert_allclose(q @ q.swapaxes(-1, -2), others @ others.swapaxes(-1, -2), atol=10 * tolerance)


@pytest.mark.parametrize("right", RIGHT)
@pytest.mark.parametrize("shape", [(9, 6), (4, 7), (3, 5, 8)])
def test_the_directions_are_the_largest_singular_vectors(shape, right):
    """Of a gradient that stays: with momentum=1 the momentum is what it was."""
    p, = leaves([np.zeros(shape)])
    optimizer = optim.Dion([p], 1.0, 0.5, 1.0, 0.0, right=right, adjust_lr_fn="match_rms_adamw", eps=1e-13)
    g = np.random.default_rng(0).standard_normal(shape)
    for step in range(600):
        p.grad = mt.tensor(g * (step == 0))
        before = p.numpy().copy()
        optimizer.step()
    u, _, vt = np.linalg.svd(g)
    k = -(-min(shape[-2:]) // 2)
    moved = (before - p.numpy()) / (0.2 * max(shape[-2:]) ** 0.5)
    np.testing.assert_allclose(moved, u[..., :k] @ vt[..., :k, :], rtol=0, atol=1e-9)


def test_what_a_step_takes_is_taken_off():
    """The momentum and what the steps have taken of it add up to the gradients."""
    p, = leaves([np.zeros((12, 8))])
    optimizer = optim.Dion([p], rank_fraction=0.25, momentum=0.0)
    taken, total = 0.0, 0.0
    for step in range(5):
        g, = gradients(step, [(12, 8)])
        before = optimizer.state_dict()["state"][0]["momentum_buffer"] + g
        p.grad = mt.tensor(g)
        optimizer.step()
        after = optimizer.state_dict()["state"][0]["momentum_buffer"]
        assert np.linalg.matrix_rank(before - after, tol=1e-9) == 2
        taken, total = taken + before - after, total + g
        np.testing.assert_allclose(taken + after, total, atol=1e-13)


def test_columns_that_have_come_to_nothing_are_drawn_anew():
    """Of a gradient of rank 1, of one column, three of four directions find nothing, until another comes."""
    p, = leaves([np.zeros((16, 16))])
    optimizer = optim.Dion([p], 1.0, 0.25, 0.0, 0.0, eps=1e-6)
    random = np.random.default_rng(1)
    for _ in range(3):
        p.grad = mt.tensor(np.outer(random.standard_normal(16), np.eye(16)[5]))
        optimizer.step()
    lengths = np.linalg.norm(optimizer.state_dict()["state"][0]["q"], axis=0)
    assert (lengths > 0.99).sum() == 1 and (lengths < 1e-6).sum() == 3
    g = random.standard_normal((16, 4)) @ random.standard_normal((4, 16))
    p.grad = mt.tensor(g)
    optimizer.step()
    assert (np.linalg.norm(optimizer.state_dict()["state"][0]["q"], axis=0) > 0.99).all()
    assert np.abs(optimizer.state_dict()["state"][0]["momentum_buffer"]).max() < 1e-9      # all of it was taken


def test_gradients_of_any_size_are_found():
    """Beside eps very small ones, too: their columns are short, and aren't drawn anew."""
    found = []
    for scale in (1.0, 2.0 ** -40):
        p, = leaves(start([(9, 8)]))
        optimizer = optim.Dion([p], rank_fraction=0.5, weight_decay=0.0, eps=1e-8)
        for step in range(4):
            p.grad = mt.tensor(scale * np.random.default_rng(step).standard_normal((9, 8)))
            optimizer.step()
        q = optimizer.state_dict()["state"][0]["q"]
        found.append(q / np.linalg.norm(q, axis=0))
        assert (np.linalg.norm(q, axis=0) < 0.01).all() == (scale < 1)
    np.testing.assert_allclose(*found, atol=1e-3)


def test_no_two_begin_with_the_same_directions():
    params = leaves(start([(8, 8)] * 2))
    optimizer = optim.Dion(params, momentum=1.0)
    for p in params:
        p.grad = mt.tensor(gradients(0, [(8, 8)])[0])
    optimizer.step()
    first, second = (each["q"] for each in optimizer.state_dict()["state"])
    assert np.abs(first - second).max() > 0.1


def test_others_beside_it_change_nothing():
    """As in another stage of a pipeline, whose optimizer has its own matrices alone."""
    found = []
    for together in (True, False):
        params = leaves(start(SHAPES[:3]))
        optimizers = [optim.Dion(params)] if together else [optim.Dion([p]) for p in params]
        for step in range(3):
            for p, g in zip(params, gradients(step), strict=False):
                p.grad = mt.tensor(g)
            for each in optimizers:
                each.step()
        found.append([p.numpy().tobytes() for p in params])
    assert found[0] == found[1]


def test_matrices_without_elements():
    params = leaves([np.zeros((0, 4)), np.ones((3, 4)), np.zeros((2, 0, 3))])
    optimizer = optim.Dion(params)
    for p in params:
        p.grad = mt.tensor(np.ones(p.shape))
    optimizer.step()
    assert optimizer.state_dict()["steps"] == [1, 1, 1] and (params[1].numpy() != 1).all()


def test_no_gradient_no_step_and_zeros_stay_zeros():
    a, b = params = leaves(start(SHAPES[:2]))
    optimizer = optim.Dion(params, weight_decay=0.0)
    a.grad = mt.tensor(np.zeros(a.shape))
    before = [p.numpy().copy() for p in params]
    optimizer.step()
    assert all((p.numpy() == v).all() for p, v in zip(params, before, strict=True))
    assert optimizer.state_dict()["steps"] == [1, 0]


@pytest.mark.parametrize("spoilt", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_is_the_whole_matrixs(spoilt):
    a, b = params = leaves(start(SHAPES[:2]))
    optimizer = optim.Dion(params)
    for p, g in zip(params, gradients(0, SHAPES[:2]), strict=True):
        p.grad = mt.tensor(g)
    a.grad.data[3, 4] = spoilt
    with np.errstate(invalid="ignore"):
        optimizer.step()
    assert np.isnan(a.numpy()).all() and np.isfinite(b.numpy()).all()


def test_a_restored_run_continues_bit_for_bit():
    found = []
    for saves in (False, True):
        params = leaves(start())
        optimizer = optim.Dion(params, 0.02)
        for step in range(6):
            if saves and step == 3:
                saved = optimizer.state_dict()
                optimizer = optim.Dion(params)
                optimizer.load_state_dict(saved)
            for p, g in zip(params, gradients(step), strict=True):
                p.grad = mt.tensor(g)
            optimizer.step()
        found.append([p.numpy().tobytes() for p in params])
    assert found[0] == found[1]


@pytest.mark.parametrize(("settings", "says"), [
    ({"rank_fraction": 0}, "rank_fraction is 0; it must be more than 0, at most 1"), ({"lr": -1}, "lr is -1"),
    ({"rank_fraction": 1.5}, "rank_fraction is 1.5"), ({"momentum": -0.1}, "momentum"), ({"eps": 0}, "eps is 0"),
    ({"right": "rows"}, "right is 'rows'; it must be columns or orthonormal"), ({"seed": -1}, "seed is -1"),
    ({"adjust_lr_fn": "adam"}, "None, original or match_rms_adamw")])
def test_settings_out_of_range_raise(settings, says):
    with pytest.raises(ValueError, match=says):
        optim.Dion(leaves(start()), **settings)


def test_what_is_no_matrix_raises():
    for shape in ((3,), (), (2, 3, 4, 5)):
        with pytest.raises(ValueError, match="Dion: a parameter of shape .* neither a matrix nor a stack"):
            optim.Dion(leaves([np.ones(shape)]))
    layer = nn.Linear(4, 3)
    layer.weight.leaf.part_of = (6, 4)
    with pytest.raises(ValueError, match=r"\(3, 4\) is a piece, or a part, of a larger one.*take Muon or Dion2"):
        optim.Dion([layer.weight])
