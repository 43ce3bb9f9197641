"""LAMB and LARS against their papers' algorithms, parameter by parameter, in NumPy float64."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import optim
from minitorch_dist.optim import optimizer as optimizers
from minitorch_dist.parallel.offload import offload_optimizer
from tests.device.fake_cupy import installed

SHAPES = [(7, 11), (13,), (31, 47), (), (0, 3), (300, 17)]
KINDS = {"lamb": lambda params, **more: optim.LAMB(params, 0.02, (0.8, 0.95), weight_decay=0.05, **more),
         "lars": lambda params, **more: optim.LARS(params, 3.0, 0.9, weight_decay=0.05, trust_coefficient=0.01, **more)}
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(optimizers, "TILE", 512)


def start():
    """One is 0, whose ratio is 1."""
    random = np.random.default_rng(1)
    return [(k != 1) * random.standard_normal(shape) for k, shape in enumerate(SHAPES)]


def gradient(step, k):
    """The first rests now and then; the third is 0 at first."""
    if k == 0 and step % 2:
        return None
    return (k != 2 or step > 0) * np.random.default_rng([step, k]).standard_normal(SHAPES[k]) * 10.0 ** (k - 3)


class Reference:
    """One parameter, as the papers write it."""

    def __init__(self, kind):
        self.kind, self.t, self.m, self.v = kind, 0, 0.0, 0.0

    def step(self, w, g):
        self.t += 1
        if self.kind == "lars":
            norm, slope = np.linalg.norm(w), np.linalg.norm(g)
            rate = 0.01 * norm / (slope + 0.05 * norm) if norm > 0 and slope > 0 else 1.0
            self.v = 0.9 * self.v + 3.0 * rate * (g + 0.05 * w)
            return w - self.v
        self.m = 0.8 * self.m + 0.2 * g
        self.v = 0.95 * self.v + 0.05 * g * g
        r = self.m / (1 - 0.8 ** self.t) / (np.sqrt(self.v / (1 - 0.95 ** self.t)) + 1e-6) + 0.05 * w
        norm, length = np.linalg.norm(w), np.linalg.norm(r)
        return w - 0.02 * (norm / length if norm > 0 and length > 0 else 1.0) * r


def train(params, optimizer):
    for step in range(6):
        for k, p in enumerate(params):
            g = gradient(step, k)
            p.grad = None if g is None else mt.tensor(np.asarray(g, p.dtype), device=p.device)
        optimizer.step()
    return params


def leaves(dtype, device="cpu"):
    return [mt.tensor(np.asarray(v, dtype), requires_grad=True, device=device) for v in start()]


@each_kind
@pytest.mark.parametrize("dtype, tolerance", [("f8", 1e-12), ("f4", 3e-6)])
def test_steps_are_the_papers(kind, dtype, tolerance):
    wanted, references = start(), [Reference(kind) for _ in SHAPES]
    for step in range(6):
        for k, w in enumerate(wanted):
            if (g := gradient(step, k)) is not None:
                wanted[k] = references[k].step(w, g)
    params = leaves(dtype)
    for p, w, v in zip(train(params, KINDS[kind](params)), wanted, start(), strict=True):
        assert p.dtype == dtype and (np.abs(w - v).max(initial=1) > 1e-3)
        np.testing.assert_allclose(p.numpy(), w, rtol=tolerance, atol=tolerance)


@each_kind
def test_parameters_of_16_bits_take_float32_s_steps_and_a_loss_scale_changes_nothing(kind):
    low, wide = leaves("f2"), [mt.tensor(v.astype("f2").astype("f4"), requires_grad=True) for v in start()]
    ours, theirs = KINDS[kind](low), KINDS[kind](wide)
    for step in range(4):
        for k, (p, w) in enumerate(zip(low, wide, strict=True)):
            g = gradient(step, k)
            p.grad = None if g is None else mt.tensor(np.asarray(g, "f2"))
            w.grad = None if g is None else mt.tensor(np.asarray(g, "f2").astype("f4") * np.float32(8))
        ours.step()
        theirs.step(grad_scale=8.0)
    for p, w in zip(low, wide, strict=True):
        assert (p.numpy() == w.numpy().astype("f2")).all()


@each_kind
def test_on_a_gpu_and_in_files(kind, tmp_path):
    """The same bits; on the host beside a GPU it is refused."""
    params = leaves("f4")
    wanted = [p.numpy().tobytes() for p in train(params, KINDS[kind](params))]
    params = leaves("f4")
    assert [p.numpy().tobytes() for p in train(params, offload_optimizer(KINDS[kind](params), tmp_path))] == wanted
    with installed():
        params = leaves("f4", "cuda")
        optimizer = KINDS[kind](params)
        assert [p.cpu().numpy().tobytes() for p in train(params, optimizer)] == wanted
        with pytest.raises(ValueError, match="can't lie on the host while its parameters are on a GPU"):
            offload_optimizer(optimizer)


def test_a_step_of_lamb_is_lr_times_the_parameters_norm():
    p = mt.tensor(np.random.default_rng(2).standard_normal((40, 30)), requires_grad=True)
    optimizer = optim.LAMB([p], 0.25, state_bits=8)
    for scale in (1.0, 1e6, 1e-3):
        before = p.numpy().copy()
        p.grad = mt.tensor(scale * np.random.default_rng(3).standard_normal((40, 30)))
        optimizer.step()
        assert np.linalg.norm(p.numpy() - before) == pytest.approx(0.25 * np.linalg.norm(before), rel=1e-12)


@each_kind
def test_one_nan_in_a_gradient_is_the_whole_parameters(kind):
    params = leaves("f4")
    optimizer = KINDS[kind](params)
    for k, p in enumerate(params):
        p.grad = mt.tensor(np.asarray(gradient(2, k), "f4"))
    params[2].grad.data[3, 4] = np.nan
    optimizer.step()
    assert [bool(np.isnan(p.numpy()).any()) for p in params] == [k == 2 for k in range(len(params))]
    assert np.isnan(params[2].numpy()).all()


@pytest.mark.parametrize("make, says", [
    (lambda p: optim.LAMB([p], eps=0.0), "eps is 0.0; it must be more than 0"),
    (lambda p: optim.LAMB([p], betas=(0.9, 1.0)), "betas"),
    (lambda p: optim.LAMB([mt.tensor(np.ones(3, "f4"), requires_grad=True)], eps=1e-50), "eps=1e-50 is 0 in float32"),
    (lambda p: optim.LARS([p], trust_coefficient=0.0), "trust_coefficient is 0.0"),
    (lambda p: optim.LARS([{"params": [p], "state_bits": 8}]), "state_bits is 8; it must be 32 for LARS"),
])
def test_what_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make(mt.tensor(np.ones(3), requires_grad=True))
