"""Adafactor against its definition in plain NumPy float64, torch's numbers, and an account of its bytes."""

import copy
import math

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import ledger, nn, optim
from minitorch_dist.flat import FlatBuffer, round_up
from minitorch_dist.optim import means as parts
from minitorch_dist.optim.means import Matrix, means
from minitorch_dist.parallel.offload import offload_optimizer
from tests.device.fake_cupy import installed

SHAPES = [(7, 11), (13,), (31, 47), (), (3, 2, 5), (4, 3, 3, 2), (300, 17), (1, 5), (5, 1), (0, 3), (200,)]
SETTINGS = {
    "default": {},
    "decayed": {"lr": 0.05, "weight_decay": 0.1, "beta2_decay": -0.5},
    "clipped late": {"lr": 0.8, "eps": (1e-4, 1e-2), "d": 2.0, "maximize": True},
    "slow": {"lr": 1e-3, "eps": (1e-3, 0.0), "beta2_decay": -1.0, "weight_decay": 0.5, "maximize": True},
}
STEPS = 12


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """So that tiles begin and end within rows."""
    monkeypatch.setattr(parts, "TILE", 320)


def start():
    random = np.random.default_rng(1)
    return [0.1 * random.standard_normal(shape) for shape in SHAPES]


def gradient(step, k):
    """One rests now and then; rows of one are of very unequal sizes, and one of them is 0."""
    if k == 0 and step % 3 == 1:
        return None
    g = np.random.default_rng([step, k]).standard_normal(SHAPES[k]) * 10.0 ** (k % 4 - 3)
    if k == 2:
        g *= 10.0 ** (np.arange(31) % 7 - 3)[:, None] * (np.arange(31) != 5)[:, None]
    return g.astype(np.float32).astype(np.float64)


def rate(settings, step):
    """As a schedule changes it."""
    return settings.get("lr", 1e-2) * (1 - step / 20)


class Reference:
    """One parameter, as torch.optim.Adafactor writes the paper's algorithms 4 and 5, in float64; exact: the dtype of
    which eps is."""

    def __init__(self, exact, beta2_decay=-0.8, eps=(None, 1e-3), d=1.0, weight_decay=0.0, maximize=False, lr=None):
        self.t, self.r, self.c, self.v = 0, 0.0, 0.0, 0.0
        self.decay, self.d, self.weight_decay, self.up = beta2_decay, d, weight_decay, maximize
        self.least = np.finfo(exact).eps if eps[0] is None else eps[0]
        self.least_rms = eps[1]

    def step(self, p, g, lr):
        self.t += 1
        w = self.t ** self.decay
        if p.ndim > 1:
            self.r = self.r + w * ((g * g).mean(-1, keepdims=True) - self.r)
            self.c = self.c + w * ((g * g).mean(-2, keepdims=True) - self.c)
            v = self.r * self.c / np.maximum(self.r.mean(-2, keepdims=True), self.least)
        else:
            self.v = v = self.v + w * (g * g - self.v)
        u = g / np.sqrt(np.maximum(v, self.least ** 2))
        alpha = max(self.least_rms, rms(p)) * min(lr, self.t ** -0.5)
        u *= alpha / max(1.0, rms(u) / self.d)
        return p * (1 - lr * self.weight_decay) + (u if self.up else -u)


def rms(x):
    return np.linalg.norm(x) / math.sqrt(x.size)


def leaves(dtype, device="cpu"):
    return [mt.tensor(np.asarray(v, dtype), requires_grad=True, device=device) for v in start()]


def train(params, optimizer, settings=SETTINGS["default"], steps=range(STEPS)):
    for step in steps:
        for k, p in enumerate(params):
            g = gradient(step, k)
            p.grad = None if g is None else mt.tensor(np.asarray(g, p.dtype), device=p.device)
        for group in optimizer.param_groups:
            group["lr"] = rate(settings, step)
        optimizer.step()
    return params


def bits_of(params, optimizer):
    state = optimizer.state_dict()
    return (state["steps"], [p.cpu().numpy().tobytes() for p in params],
            [[(name, a.shape, a.tobytes()) for name, a in arrays.items()] for arrays in state["state"]])


@pytest.mark.parametrize("dtype, tolerance", [("f8", 1e-12), ("f4", 3e-6)])
@pytest.mark.parametrize("name", SETTINGS)
def test_steps_are_the_papers(name, dtype, tolerance):
    settings = SETTINGS[name]
    wanted, references = start(), [Reference(dtype, **settings) for _ in SHAPES]
    for step in range(STEPS):
        for k, w in enumerate(wanted):
            if (g := gradient(step, k)) is not None and w.size:
                wanted[k] = references[k].step(w, g, rate(settings, step))
    params = leaves(dtype)
    optimizer = optim.Adafactor(params, **settings)
    train(params, optimizer, settings)
    for p, w, v, arrays, reference in zip(params, wanted, start(), optimizer.state_dict()["state"], references,
                                          strict=True):
        assert p.dtype == dtype and (np.abs(w - v).max(initial=1) > 1e-4)
        np.testing.assert_allclose(p.numpy(), w, rtol=tolerance, atol=tolerance)
        kept = {"row_var": reference.r, "col_var": reference.c} if w.ndim > 1 else {"variance": reference.v}
        assert set(arrays) == set(kept)
        for name in kept if w.size else ():
            assert arrays[name].dtype == dtype and arrays[name].shape == np.shape(kept[name])
            np.testing.assert_allclose(arrays[name], kept[name], rtol=10 * tolerance)


@pytest.mark.parametrize("dtype, tolerance", [("f8", 1e-12), ("f4", 3e-6)])
@pytest.mark.parametrize("name", SETTINGS)
def test_steps_are_torchs(name, dtype, tolerance):
    torch = pytest.importorskip("torch", minversion="2.5")
    settings = SETTINGS[name]
    theirs = [torch.nn.Parameter(torch.tensor(np.asarray(v, dtype))) for v in start()]
    reference = torch.optim.Adafactor(theirs, **settings)
    params = leaves(dtype)
    optimizer = optim.Adafactor(params, **settings)
    assert {k: v for k, v in optimizer.param_groups[0].items() if k not in ("params", "state_bits")} == {
        k: v for k, v in reference.param_groups[0].items() if k not in ("params", "foreach")}
    for step in range(STEPS):
        for k, p in enumerate(theirs):
            g = gradient(step, k)
            p.grad = None if g is None or not p.numel() else torch.tensor(np.asarray(g, dtype))
        reference.param_groups[0]["lr"] = rate(settings, step)
        reference.step()
    train(params, optimizer, settings)
    for ours, p, arrays in zip(params, theirs, optimizer.state_dict()["state"], strict=True):
        np.testing.assert_allclose(ours.numpy(), p.detach().numpy(), rtol=tolerance, atol=tolerance)
        for name, array in arrays.items() if p.numel() else ():
            np.testing.assert_allclose(array, reference.state[p][name].numpy(), rtol=10 * tolerance)


# ---------------------------------------------------------------- means

def means_of(g, power=2):
    """(over rows, over columns) of one matrix."""
    p = mt.tensor(np.zeros_like(g), requires_grad=True)
    FlatBuffer([p])
    flat = g.reshape(-1)
    return means([Matrix(p)], lambda k, tile: flat[tile], power)[0]


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_means_are_exact_but_for_a_unit(dtype, power):
    """Of rows and columns whose sizes are many powers of ten apart, too: against sums that round once."""
    random = np.random.default_rng(3)
    g = random.standard_normal((90, 130)) * 10.0 ** random.integers(-9, 9, (90, 1))
    g *= 10.0 ** random.integers(-9, 9, 130)
    g[4], g[:, 6] = 0, 0
    g = g.astype(dtype)
    exact = abs(g.astype(object)) ** power if dtype == "f8" else np.abs(g.astype(np.float64)) ** power
    for axis, found in zip((1, 0), means_of(g, power), strict=True):
        lines = exact if axis else exact.T
        n = lines.shape[1]
        wanted = np.array([math.fsum(map(float, line)) / n for line in lines])
        off = np.abs(found.ravel() - wanted)
        assert (off <= 4 * n / 2 ** (62 - n.bit_length() - 1) * wanted).all() and (found.ravel() == 0).sum() == 1
    assert off.any()


def test_means_of_numbers_at_both_ends_of_a_dtype():
    for power in range(-323, -150):
        assert all(((0 <= found) & (found <= 1e-300)).all() for found in means_of(np.full((3, 5), 10.0 ** power)))
    for found in means_of(np.full((3, 5), 1e150)):
        np.testing.assert_allclose(found, 1e300, rtol=1e-12)
    for found in means_of(np.full((3, 5), 1e300)):
        assert np.isinf(found).all()
    for each in (1e-140, 1e300):
        for found in means_of(np.full((3, 5), -each), power=1):
            np.testing.assert_allclose(found, each, rtol=1e-12)
    for spoilt in (np.nan, -np.nan, np.inf, -np.inf):
        g = np.ones((4, 6))
        g[1, 2] = spoilt
        rows, columns = means_of(g)
        assert np.isnan(rows.ravel()).tolist() == [False, True, False, False]
        assert np.isnan(columns.ravel()).tolist() == [k == 2 for k in range(6)]


@pytest.mark.parametrize("spoilt", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_is_the_whole_matrixs(spoilt):
    params = leaves("f4")
    optimizer = optim.Adafactor(params)
    for k, p in enumerate(params):
        p.grad = mt.tensor(np.asarray(gradient(0, k), "f4"))
    params[2].grad.data[3, 4] = spoilt
    with np.errstate(invalid="ignore"):
        optimizer.step()
    assert [bool(np.isnan(p.numpy()).any()) for p in params] == [k == 2 for k in range(len(params))]
    assert np.isnan(params[2].numpy()).all()


def test_a_gradient_of_zeros_is_no_step():
    params = leaves("f4")
    optimizer = optim.Adafactor(params)
    before = [p.numpy().copy() for p in params]
    for p in params[1:]:
        p.grad = mt.zeros_like(p)
    optimizer.step()
    assert all((p.numpy() == v).all() for p, v in zip(params, before, strict=True))
    assert optimizer.state_dict()["steps"] == [0] + [1] * (len(params) - 1)


def test_a_step_is_in_proportion_to_the_parameter():
    """Of a matrix of signs u is 1 everywhere: lr · RMS(p), whatever the gradient's size."""
    signs = np.random.default_rng(3).choice([-1.0, 1.0], (40, 30))
    for scale in (1e-6, 1.0, 1e6):
        p = mt.tensor(np.random.default_rng(2).standard_normal((40, 30)), requires_grad=True)
        before = p.numpy().copy()
        p.grad = mt.tensor(scale * signs)
        optim.Adafactor([p], lr=0.25).step()
        np.testing.assert_allclose(before - p.numpy(), 0.25 * rms(before) * signs, rtol=1e-9)


# ---------------------------------------------------------------- state

def test_a_gpts_state_beside_adams():
    """Rows + columns of each matrix instead of twice their product: by the shapes, to the byte."""
    held = {}
    for make in (optim.Adam, optim.Adafactor):
        mt.manual_seed(0)
        model = nn.GPT(300, 64, layers=2, heads=4, dim=128)
        optimizer = make(model.parameters())
        for p in model.parameters():
            p.grad = mt.zeros_like(p)
        with ledger.record(memory=True) as book:
            optimizer.step()
        held[make] = sum(a.nbytes for arrays in optimizer.state for a in arrays.values())
        assert book.peak["optimizer"] == held[make]
    shapes = [p.shape for p in model.parameters()]
    matrices, others = [s for s in shapes if len(s) > 1], [s for s in shapes if len(s) < 2]
    assert held[optim.Adafactor] == 4 * (sum(map(sum, matrices)) + sum(round_up(math.prod(s), 16) for s in others))
    assert held[optim.Adafactor] < held[optim.Adam] / 70


def test_state_goes_into_another_one():
    params, again = leaves("f4"), leaves("f4")
    optimizer, other = optim.Adafactor(params), optim.Adafactor(again, lr=0.5)
    train(params, optimizer, steps=range(4))
    other.load_state_dict(optimizer.state_dict())
    for p, q in zip(params, again, strict=True):
        q.data[...] = p.data
    assert bits_of(train(params, optimizer, steps=range(4, 8)), optimizer) == bits_of(
        train(again, other, steps=range(4, 8)), other)
    saved = optimizer.state_dict()
    saved["state"][0]["row_var"] = saved["state"][0]["row_var"].T
    with pytest.raises(ValueError, match=r"saved row_var is of shape \(1, 7\) and dtype float32; of a parameter of "
                                         r"shape \(7, 11\) and dtype float32 it is \(7, 1\) and float32"):
        other.load_state_dict(saved)
    with pytest.raises(ValueError, match="is of Adafactor, this optimizer is Adagrad"):
        optim.Adagrad(again).load_state_dict(saved)


@pytest.mark.parametrize("how", ["moved", "copied", "combined", "in a file", "on a gpu"])
def test_the_same_bits_elsewhere(how, tmp_path):
    params = leaves("f4")
    optimizer = optim.Adafactor(params)
    wanted = bits_of(train(params, optimizer), optimizer)
    if how == "on a gpu":
        with installed():
            params = leaves("f4", "cuda")
            optimizer = optim.Adafactor(params)
            assert bits_of(train(params, optimizer), optimizer) == wanted
            with pytest.raises(ValueError, match="can't lie on the host while its parameters are on a GPU"):
                offload_optimizer(optimizer)
        return
    params = leaves("f4")
    optimizer = optim.Combined(*(optim.Adafactor(half) for half in (params[:4], params[4:]))) if how == "combined" \
        else optim.Adafactor(params)
    if how == "in a file":
        offload_optimizer(optimizer, tmp_path)
    train(params, optimizer, steps=range(5))
    if how == "moved":
        FlatBuffer(params[1:6][::-1])
    if how == "copied":
        params, optimizer = copy.deepcopy((params, optimizer))
    assert bits_of(train(params, optimizer, steps=range(5, STEPS)), optimizer) == wanted
    assert sum(map(len, optimizer.own_shapes())) == 2 * sum(len(shape) > 1 for shape in SHAPES)


@pytest.mark.parametrize("dtype", ["f2", "bfloat16"])
def test_parameters_of_16_bits_take_float32_s_steps_and_a_loss_scale_changes_nothing(dtype):
    low = [mt.tensor(np.asarray(v, "f4"), requires_grad=False).astype(dtype).requires_grad_() for v in start()]
    wide = [p.detach().astype("f4").requires_grad_() for p in low]
    ours, theirs = optim.Adafactor(low, 0.05), optim.Adafactor(wide, 0.05)
    for step in range(4):
        for k, (p, w) in enumerate(zip(low, wide, strict=True)):
            g = gradient(step, k)
            p.grad = None if g is None else mt.tensor(np.asarray(g, "f4")).astype(dtype)
            w.grad = None if g is None else p.grad.astype("f4") * np.float32(8)
        ours.step()
        theirs.step(grad_scale=8.0)
    for p, w in zip(low, wide, strict=True):
        assert (p.numpy() == w.astype(dtype).numpy()).all()


@pytest.mark.parametrize("settings, says", [
    ({"lr": -1.0}, "lr is -1.0; it must be at least 0"),
    ({"beta2_decay": 0.1}, "beta2_decay is 0.1; it must be at most 0"),
    ({"eps": (0.0, 1e-3)}, "eps is .*; it must be a pair: None or more than 0, and at least 0"),
    ({"eps": (None, -1.0)}, "eps is .*; it must be a pair"),
    ({"eps": (1e-3,)}, "eps is .*; it must be a pair"),
    ({"eps": (1e-30, 1e-3)}, "eps is .*; it must be more than 0 in float32, squared as well"),
    ({"d": 0.5}, "d is 0.5; it must be at least 1"),
    ({"weight_decay": -0.1}, "weight_decay is -0.1"),
])
def test_what_is_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        optim.Adafactor([mt.tensor(np.ones((2, 3), "f4"), requires_grad=True)], **settings)


def test_state_of_8_bits_is_refused():
    with pytest.raises(ValueError, match="state_bits is 8; it must be 32 for Adafactor"):
        optim.Adafactor([{"params": [mt.tensor(np.ones((2, 3)), requires_grad=True)], "state_bits": 8}])
