"""Dion2 against its equations in plain NumPy, with singular value decompositions; and against Muon."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import comm, optim
from minitorch_dist.flat import FlatBuffer
from minitorch_dist.optim.dion2 import Lines, largest_lines
from minitorch_dist.optim.matrices import Cut, narrowed
from minitorch_dist.optim.means import Matrix
from minitorch_dist.parallel.tensor.parts import Part
from tests.device.fake_cupy import installed

from .test_muon import SHAPES, by_svd, gradients, leaves, start

SETTINGS = [{"lr": 0.02}, {"lr": 0.01, "fraction": 0.6, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.3},
            {"lr": 0.02, "fraction": 0.1, "momentum": 0.0, "weight_decay": 0.0},
            {"lr": 0.02, "fraction": 1, "ns_steps": 3}]


class Reference:
    """One matrix's, written line by line, in float64."""

    matrix = True

    def __init__(self, lr, fraction=0.25, momentum=0.95, weight_decay=0.01, adjust_lr_fn=None, ns_steps=5):
        self.lr, self.fraction, self.momentum, self.decay = lr, fraction, momentum, weight_decay
        self.adjust, self.steps, self.m = adjust_lr_fn, ns_steps, 0.0

    def step(self, p, g):
        self.m = self.m + g
        wide = p.shape[0] <= p.shape[1]
        lines = self.m if wide else self.m.T
        count = max(1, int(np.ceil(self.fraction * len(lines) - 1e-9)))
        chosen = sorted(sorted(range(len(lines)), key=lambda k: -sum(abs(x) for x in lines[k]))[:count])
        o = by_svd(lines[chosen], steps=self.steps)
        for k in chosen:
            lines[k] *= self.momentum
        p = p - self.lr * self.decay * p
        rows, columns = p.shape if self.matrix else p.shape[::-1]
        scale = 0.2 * max(rows, columns) ** 0.5 if self.adjust == "match_rms_adamw" else max(1, rows / columns) ** 0.5
        for k, line in zip(chosen, o, strict=True):
            (p if wide else p.T)[k] -= self.lr * scale * line
        return p


class OfExperts(Reference):
    """(in, out): the other way round than a Linear's weight."""

    matrix = False


def references(settings):
    """A list by parameter: of one, or one per matrix of a stack."""
    return [[Reference(**settings)] if len(shape) == 2 else [OfExperts(**settings) for _ in range(shape[0])]
            for shape in SHAPES]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("settings", SETTINGS)
def test_twenty_steps_are_the_papers(settings, dtype):
    wanted = [v.astype(dtype).astype(np.float64) for v in start()]
    its, params = references(settings), leaves(start(), dtype)
    optimizer = optim.Dion2(params, **settings)
    for step in range(20):
        for k, (p, g) in enumerate(zip(params, gradients(step), strict=True)):
            p.grad = mt.tensor(g.astype(dtype))
            g = g.astype(dtype).astype(np.float64)
            new = [each.step(v, d) for each, v, d in zip(its[k], wanted[k].reshape(-1, *p.shape[-2:]),
                                                        g.reshape(-1, *p.shape[-2:]), strict=True)]
            wanted[k] = np.stack(new).reshape(p.shape)
        optimizer.step()
    momenta = [each["momentum_buffer"] for each in optimizer.state_dict()["state"]]
    for p, w, m, each in zip(params, wanted, momenta, its, strict=True):
        assert p.dtype == dtype
        np.testing.assert_allclose(p.numpy(), w, rtol=0, atol=2e-5 if dtype == np.float32 else 1e-11)
        np.testing.assert_allclose(m.reshape(-1, *p.shape[-2:]), np.stack([one.m for one in each]), rtol=0,
                                   atol=2e-6 if dtype == np.float32 else 1e-12)


def test_all_of_it_is_muon():
    found = []
    for make in (lambda ps: optim.Muon(ps, 0.02, 0.1, 0.9, nesterov=False),
                 lambda ps: optim.Dion2(ps, 0.02, 1.0, 0.9, 0.1)):
        params = leaves(start())
        optimizer = make(params)
        for step in range(5):
            for p, g in zip(params, gradients(step), strict=True):
                p.grad = mt.tensor(g)
            optimizer.step()
        found.append([p.numpy() for p in params])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-13)


def test_a_line_that_waits_loses_nothing():
    """One of 1/100 the length of the others has its step as soon as what has added up is longest."""
    g = np.ones((4, 6)) * [[0.3], [0.05], [0.3], [0.3]]
    p, = leaves([np.zeros((4, 6))])
    optimizer = optim.Dion2([p], lr=1.0, fraction=0.25, momentum=0.0, weight_decay=0.0)
    moved = []
    for _ in range(30):
        before = p.numpy().copy()
        p.grad = mt.tensor(g)
        optimizer.step()
        line, = np.flatnonzero(np.abs(p.numpy() - before).max(1))
        moved.append(int(line))
    m = optimizer.state_dict()["state"][0]["momentum_buffer"]
    assert moved[:3] == [0, 2, 3] and moved.count(1) == 1       # 30 · 0.05 is 5 · 0.3, what each third step takes
    for line in range(4):
        last = max((t for t, which in enumerate(moved) if which == line), default=-1)
        np.testing.assert_allclose(m[line], (29 - last) * g[line], atol=1e-12)


def test_the_largest_lines():
    found = largest_lines((1, 4, 5), "rows", np.array([[[3], [1], [3], [2]]], float), 0.5)
    assert found.rows and found.indices.tolist() == [[0, 2]] and found.shape == (1, 2, 5)
    found = largest_lines((2, 5, 3), "columns", np.array([[[0, np.nan, 7]], [[1, 1, 1]]]), 0.34)
    assert not found.rows and found.indices.tolist() == [[1, 2], [0, 1]] and found.shape == (2, 2, 5)
    for fraction, count in ((1e-9, 1), (0.28, 7), (0.2801, 8), (1, 25)):       # 0.28 · 25 is 7.000000000000001
        sums = np.random.default_rng(0).random((1, 25, 1))
        found = largest_lines((1, 25, 31), "rows", sums, fraction).indices[0]
        assert found.tolist() == sorted(np.argsort(-sums.ravel())[:count].tolist())


@pytest.mark.parametrize("rows", [True, False])
def test_lines_are_taken_and_put_back(rows):
    whole = (3, 4, 7)
    indices = np.array([[0, 2], [1, 3], [0, 1]])
    it = Lines(whole, rows, indices)
    x = np.random.default_rng(1).standard_normal(whole)
    wanted = np.stack([m[i] if rows else m.T[i] for m, i in zip(x, indices, strict=True)])
    assert (it.of(x.reshape(-1)) == wanted).all() and it.shape == wanted.shape
    mask = np.zeros(whole, bool)
    for k, chosen in enumerate(indices):
        mask[k, chosen if rows else slice(None), slice(None) if rows else chosen] = True
    assert (it.mask() == mask).all() and (it.alone(wanted) == np.where(mask, x, 0)).all()
    p = mt.tensor(np.zeros(whole), requires_grad=True)
    FlatBuffer([p])
    y = x.reshape(-1).copy()
    Matrix(p).multiply(y, it.of_each(1, 0.5, y.dtype))
    assert (y.reshape(whole) == np.where(mask, x / 2, x)).all()


def test_what_is_sent_of_a_cut():
    """By rank, of the lines alone; and so is the work by which an owner is found."""
    it, world = Lines((1, 2, 5), True, np.array([[1]])), comm.communicator.world_of_one()
    cut = Cut(world, "p", (2, 5), (10,), [slice(0, 7), slice(7, 10)], [7, 3])
    found, = narrowed([cut], it)
    assert found.matrix == (1, 1, 5) and found.sizes == [2, 3]
    part = found.packed(np.arange(7.0), 0)
    assert part.tolist() == [5, 6] and found.unpacked(part, 0, (7,)).tolist() == [0, 0, 0, 0, 0, 5, 6]
    assert narrowed([cut], None) == [cut] and cut.packed(part, 0) is not None and narrowed([], it) == []


@pytest.mark.parametrize("shape", [(5, 7), (7, 5)])
@pytest.mark.parametrize("axis", [0, 1])
def test_parts_in_another_order_take_the_same_step(shape, axis):
    """Of rows and of columns, along which lines are chosen, or across; on a GPU, the stand-in's, too."""
    value, *grads = np.random.default_rng(2).standard_normal((4, *shape))
    order, found = np.random.default_rng(3).permutation(shape[axis]), []
    with installed():
        for device, indices in (("cpu", None), ("cpu", order), ("cuda", order)):
            p, *gs = (mt.tensor(a if indices is None else np.take(a, indices, axis), device=device)
                      for a in (value, *grads))
            p.requires_grad_()
            if indices is not None:
                p.leaf.part_of, p.leaf.part = shape, Part(comm.world(), axis, indices, shape[axis])
            optimizer = optim.Dion2([p], 0.1, 0.4)
            for p.grad in gs:
                optimizer.step()
            found.append(p.cpu().numpy().copy())
    for each in found[1:]:
        np.testing.assert_allclose(each, np.take(found[0], order, axis), rtol=0, atol=1e-13)


@pytest.mark.parametrize("spoilt", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_is_seen_at_once(spoilt):
    """A line of it would never be the largest, as a number."""
    p, = leaves([np.zeros((8, 9))])
    optimizer = optim.Dion2([p])
    g = np.ones((8, 9))
    g[5, 2] = spoilt
    p.grad = mt.tensor(g)
    with np.errstate(invalid="ignore"):
        optimizer.step()
    assert np.isnan(p.numpy()[5]).all()


def test_gradients_of_16_bits_have_float32_momentum_and_masters():
    p, = leaves([start([(8, 12)])[0]], np.float16)
    twin, = leaves([p.numpy().astype(np.float64)])
    short, exact = optim.Dion2([p], 0.1), optim.Dion2([twin], 0.1)
    for which, optimizer in ((p, short), (twin, exact)):
        for step in range(3):
            which.grad = mt.tensor(gradients(step, [(8, 12)])[0].astype(np.float16).astype(which.dtype))
            optimizer.step()
    assert {name: a.dtype for name, a in short.state[0].items()} == dict.fromkeys(("master", "momentum_buffer"), "f4")
    np.testing.assert_allclose(p.numpy(), twin.numpy(), rtol=0, atol=2 ** -11)


@pytest.mark.parametrize(("settings", "says"), [
    ({"fraction": 0}, "fraction is 0; it must be more than 0, at most 1"), ({"fraction": 1.1}, "fraction is 1.1"),
    ({"lr": -1}, "lr is -1"), ({"momentum": -0.1}, "momentum"), ({"ns_steps": 0}, "ns_steps is 0"),
    ({"adjust_lr_fn": "adam"}, "None, original or match_rms_adamw")])
def test_settings_out_of_range_raise(settings, says):
    with pytest.raises(ValueError, match=says):
        optim.Dion2(leaves(start()), **settings)


def test_messages_name_it():
    with pytest.raises(ValueError, match="Dion2: a parameter of shape .3,. is neither a matrix nor a stack"):
        optim.Dion2(leaves([np.ones(3)]))
    p, = leaves([np.ones((2, 3))])
    optimizer = optim.Dion2([p])
    y = (p * p).sum()
    p.grad = mt.tensor(np.ones((2, 3)))
    optimizer.step()
    with pytest.raises(RuntimeError, match="Dion2.step"):
        y.backward()
    with pytest.raises(ValueError, match="the saved state is of Muon, this optimizer is Dion2"):
        optimizer.load_state_dict(optim.Muon([p]).state_dict())
