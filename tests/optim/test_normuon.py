"""NorMuon against its equations in plain NumPy, with singular value decompositions."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import comm, optim
from minitorch_dist.flat import FlatBuffer
from minitorch_dist.optim import means as parts
from minitorch_dist.optim.means import Matrix
from minitorch_dist.parallel.tensor.parts import Part
from tests.device.fake_cupy import installed

from .test_muon import SHAPES, by_svd, gradients, leaves, start

SETTINGS = [{"lr": 0.02}, {"lr": 0.01, "beta2": 0.5, "nesterov": True, "weight_decay": 0.3},
            {"lr": 0.02, "beta2": 0.0, "momentum": 0.5, "weight_decay": 0.0, "ns_steps": 3}]


class Reference:
    """One (out, in) matrix's, in float64."""

    def __init__(self, lr, weight_decay=0.1, momentum=0.95, beta2=0.95, nesterov=False, ns_steps=5):
        self.lr, self.decay, self.momentum, self.beta2 = lr, weight_decay, momentum, beta2
        self.nesterov, self.steps, self.b, self.v = nesterov, ns_steps, 0.0, 0.0

    def step(self, p, g):
        self.b = self.momentum * self.b + g
        o = by_svd(g + self.momentum * self.b if self.nesterov else self.b, steps=self.steps)
        self.v = self.beta2 * self.v + (1 - self.beta2) * (o ** 2).mean(1)
        o = o / (np.sqrt(self.v) + 1e-8)[:, None]
        return p - self.lr * self.decay * p - 0.2 * self.lr * np.sqrt(p.size) / np.linalg.norm(o) * o


def as_rows(a):
    """[matrices with a row per neuron] of a Linear's (out, in), and of experts' (n, in, out)."""
    return [a] if a.ndim == 2 else [each.T for each in a]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("settings", SETTINGS)
def test_twenty_steps_are_the_papers(settings, dtype):
    params = leaves(start(), dtype)
    wanted = [[v.astype(np.float64) for v in as_rows(p.numpy())] for p in params]
    references = [[Reference(**settings) for _ in each] for each in wanted]
    optimizer = optim.NorMuon(params, **settings)
    for step in range(20):
        for k, (p, g) in enumerate(zip(params, gradients(step), strict=True)):
            p.grad = mt.tensor(g.astype(dtype))
            wanted[k] = [one.step(v, d.astype(dtype).astype(np.float64)) for one, v, d in
                         zip(references[k], wanted[k], as_rows(g), strict=True)]
        before = [p.numpy().copy() for p in params]
        optimizer.step()
        for p, b in zip(params, before, strict=True):
            for new, old in zip(as_rows(p.numpy()), as_rows(b), strict=True):
                moved = new - (1 - settings["lr"] * settings.get("weight_decay", 0.1)) * old.astype(np.float64)
                np.testing.assert_allclose(np.sqrt((moved ** 2).mean()), 0.2 * settings["lr"], rtol=1e-3)
    for p, w, its, state in zip(params, wanted, references, optimizer.state_dict()["state"], strict=True):
        assert p.dtype == dtype and state["neuron_var"].shape == ((*p.shape[:-2], 1, p.shape[-1]) if p.ndim == 3
                                                                  else (p.shape[0], 1))
        for found, value, v, one in zip(as_rows(p.numpy()), w, state["neuron_var"].reshape(len(w), -1), its,
                                        strict=True):
            np.testing.assert_allclose(found, value, rtol=0, atol=5e-5 if dtype == np.float32 else 1e-11)
            np.testing.assert_allclose(v, one.v, rtol=1e-3 if dtype == np.float32 else 1e-10)


def test_rows_of_one_length():
    """Without an average of v."""
    p, = leaves([np.zeros((7, 11))])
    optimizer = optim.NorMuon([p], 1.0, 0.0, beta2=0.0)
    p.grad = mt.tensor(gradients(0, [(7, 11)])[0])
    optimizer.step()
    np.testing.assert_allclose(np.linalg.norm(p.numpy(), axis=1), 0.2 * np.sqrt(11), rtol=1e-6)


def test_no_gradient_no_step_and_zeros_stay_zeros():
    a, b = params = leaves(start(SHAPES[:2]))
    optimizer = optim.NorMuon(params, weight_decay=0.0)
    a.grad = mt.tensor(np.zeros(a.shape))
    before = [p.numpy().copy() for p in params]
    optimizer.step()
    assert all((p.numpy() == v).all() for p, v in zip(params, before, strict=True))
    assert optimizer.state_dict()["steps"] == [1, 0]


@pytest.mark.parametrize("kind", [optim.Muon, optim.NorMuon, optim.Dion2])
@pytest.mark.filterwarnings("error")
def test_matrices_without_elements(kind):
    params = leaves([np.zeros((0, 4)), np.ones((3, 4)), np.zeros((2, 0, 3))])
    optimizer = kind(params)
    for p in params:
        p.grad = mt.tensor(np.ones(p.shape))
    optimizer.step()
    assert optimizer.state_dict()["steps"] == [1, 1, 1] and (params[1].numpy() != 1).any()


@pytest.mark.parametrize("spoilt", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_is_the_whole_matrixs(spoilt):
    a, b = params = leaves(start(SHAPES[:2]))
    optimizer = optim.NorMuon(params)
    for p, g in zip(params, gradients(0, SHAPES[:2]), strict=True):
        p.grad = mt.tensor(g)
    a.grad.data[3, 4] = spoilt
    with np.errstate(invalid="ignore"):
        optimizer.step()
    assert np.isnan(a.numpy()).all() and np.isfinite(b.numpy()).all()


@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 1, 4), (1, 4, 1), (2, 1, 1)])
def test_lines_are_multiplied(monkeypatch, shape):
    """In tiles that begin anywhere."""
    monkeypatch.setattr(parts, "TILE", 3)
    n, rows, columns = shape
    x = np.random.default_rng(1).standard_normal(shape)
    p = mt.tensor(np.zeros(shape), requires_grad=True)
    FlatBuffer([p])
    for lines in (np.random.default_rng(2).random((n, rows, 1)), np.random.default_rng(3).random((n, 1, columns))):
        y = x.reshape(-1).copy()
        Matrix(p).multiply(y, lines)
        assert (y.reshape(shape) == x * lines).all()


@pytest.mark.parametrize("axis", [0, 1])
def test_parts_in_another_order_take_the_same_step(axis):
    """On a GPU, the stand-in's, too."""
    value, *grads = np.random.default_rng(2).standard_normal((4, 5, 7))
    order, found = np.random.default_rng(3).permutation((5, 7)[axis]), []
    with installed():
        for device, indices in (("cpu", None), ("cpu", order), ("cuda", order)):
            p, *gs = (mt.tensor(a if indices is None else np.take(a, indices, axis), device=device)
                      for a in (value, *grads))
            p.requires_grad_()
            if indices is not None:
                p.leaf.part_of, p.leaf.part = (5, 7), Part(comm.world(), axis, indices, (5, 7)[axis])
            optimizer = optim.NorMuon([p], 0.1)
            for p.grad in gs:
                optimizer.step()
            found.append(p.cpu().numpy().copy())
    for each in found[1:]:
        np.testing.assert_allclose(each, np.take(found[0], order, axis), rtol=0, atol=1e-13)


@pytest.mark.parametrize(("settings", "says"), [
    ({"beta2": 1.0}, "beta2 is 1.0; it must be in"), ({"beta2": -0.1}, "beta2"), ({"lr": -1}, "lr is -1"),
    ({"eps": 0}, "eps is 0"), ({"momentum": -0.1}, "momentum")])
def test_settings_out_of_range_raise(settings, says):
    with pytest.raises(ValueError, match=says):
        optim.NorMuon(leaves(start()), **settings)


def test_messages_name_it():
    with pytest.raises(ValueError, match="NorMuon: a parameter of shape .3,. is neither a matrix nor a stack"):
        optim.NorMuon(leaves([np.ones(3)]))
    p, = leaves([np.ones((2, 3))])
    optimizer = optim.NorMuon([p])
    y = (p * p).sum()
    p.grad = mt.tensor(np.ones((2, 3)))
    optimizer.step()
    with pytest.raises(RuntimeError, match="NorMuon.step"):
        y.backward()
