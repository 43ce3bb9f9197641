"""SGD, Adam(W) and Adagrad against their papers' formulas in plain NumPy float64 (and torch, where it is installed)."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import ledger, nn, optim
from minitorch_dist.optim.optimizer import TILE

SHAPES = [(7, 11), (13,), (233, 331), (), (1,), (0, 3), (2, 3, 5)]
assert 233 * 331 > 2 * TILE and 233 * 331 % TILE
STEPS = 100

SETTINGS = {    # name -> (kind, settings)
    "sgd": ("sgd", {"lr": 0.01}),
    "sgd decay": ("sgd", {"lr": 0.01, "weight_decay": 0.1}),
    "momentum": ("sgd", {"lr": 0.003, "momentum": 0.9}),
    "momentum decay": ("sgd", {"lr": 0.003, "momentum": 0.8, "weight_decay": 0.05}),
    "nesterov": ("sgd", {"lr": 0.003, "momentum": 0.9, "nesterov": True}),
    "nesterov decay": ("sgd", {"lr": 0.003, "momentum": 0.7, "nesterov": True, "weight_decay": 0.1}),
    "adam": ("adam", {}),
    "adam decay": ("adam", {"lr": 2e-3, "weight_decay": 0.1}),
    "adam betas": ("adam", {"lr": 5e-4, "betas": (0.8, 0.95), "eps": 1e-3}),
    "adamw": ("adamw", {}),
    "adagrad": ("adagrad", {}),
    "adagrad decays": ("adagrad", {"lr": 0.05, "lr_decay": 0.02, "weight_decay": 0.1, "eps": 1e-3,
                                   "initial_accumulator_value": 0.3}),
    "adamw decay": ("adamw", {"lr": 2e-3, "weight_decay": 0.3, "betas": (0.85, 0.99), "eps": 1e-6}),
}
DEFAULTS = {    # torch's
    "sgd": {"momentum": 0.0, "weight_decay": 0.0, "nesterov": False},
    "adam": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    "adamw": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2},
    "adagrad": {"lr": 1e-2, "lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10},
}
CLASSES = {"sgd": optim.SGD, "adam": optim.Adam, "adamw": optim.AdamW, "adagrad": optim.Adagrad}


class Reference:
    """One parameter's optimizer as the papers write it, in float64."""

    def __init__(self, kind, **settings):
        self.kind, self.s = kind, {**DEFAULTS[kind], **settings}
        self.t, self.m, self.v = 0, 0.0, self.s.get("initial_accumulator_value", 0.0)

    def step(self, p, g):
        s = self.s
        self.t += 1
        if self.kind == "sgd":
            g = g + s["weight_decay"] * p
            self.m = s["momentum"] * self.m + g
            return p - s["lr"] * (g + s["momentum"] * self.m if s["nesterov"] else self.m)
        if self.kind == "adagrad":
            g = g + s["weight_decay"] * p
            self.v = self.v + g ** 2
            return p - s["lr"] / (1 + (self.t - 1) * s["lr_decay"]) * g / (np.sqrt(self.v) + s["eps"])
        if self.kind == "adamw":
            p = p - s["lr"] * s["weight_decay"] * p
        else:
            g = g + s["weight_decay"] * p
        beta1, beta2 = s["betas"]
        self.m = beta1 * self.m + (1 - beta1) * g
        self.v = beta2 * self.v + (1 - beta2) * g ** 2
        m_hat, v_hat = self.m / (1 - beta1 ** self.t), self.v / (1 - beta2 ** self.t)
        return p - s["lr"] * m_hat / (np.sqrt(v_hat) + s["eps"])


def start(shapes=SHAPES, seed=0):
    """Values of the size that layers have: a float32 near 0.1 is known to 4e-9, so that 1e-6 is a sharp tolerance."""
    random = np.random.default_rng(seed)
    return [0.1 * random.standard_normal(shape) for shape in shapes]


def gradients(step, shapes=SHAPES, dtype=np.float32):
    """The gradients of one step, exact in float32. (0, 3) has some too, of no element."""
    random = np.random.default_rng([step, 99])
    return [random.standard_normal(shape, np.float32).astype(dtype)[()] for shape in shapes]


def leaves(values, dtype):
    return [mt.tensor(np.asarray(v, dtype), requires_grad=True) for v in values]


def through_backward(params, grads):
    """Leave the given gradients on the parameters, the way training does."""
    sum((p * g).sum() for p, g in zip(params, grads, strict=True)).backward()


def close(params, wanted, tolerance, rtol=0.0):
    for p, w in zip(params, wanted, strict=True):
        assert p.numpy().shape == w.shape
        np.testing.assert_allclose(p.numpy(), w, rtol=rtol, atol=tolerance)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_hundred_steps_are_the_papers(name, dtype):
    kind, settings = SETTINGS[name]
    wanted = [np.asarray(v, dtype).astype(np.float64) for v in start()]
    references = [Reference(kind, **settings) for _ in wanted]
    params = leaves(start(), dtype)
    optimizer = CLASSES[kind](params, **settings)
    for step in range(STEPS):
        grads = gradients(step, dtype=dtype)
        optimizer.zero_grad()
        through_backward(params, grads)
        optimizer.step()
        wanted = [np.asarray(r.step(w, g.astype(np.float64)))
                  for r, w, g in zip(references, wanted, grads, strict=True)]
    assert max(np.abs(w - v).max(initial=0) for w, v in zip(wanted, start(), strict=True)) > 0.01   # they have moved
    # AdamW's factor 1 - lr · weight_decay, rounded to the dtype, is off by up to eps/4, the same way in every step.
    rounded = STEPS * np.finfo(dtype).eps / 4 if kind == "adamw" else 0.0
    close(params, wanted, 1e-6 if dtype == np.float32 else 1e-13, rounded)
    assert all(p.dtype == dtype for p in params)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_hundred_steps_are_torchs(name):
    torch = pytest.importorskip("torch")
    kind, settings = SETTINGS[name]
    theirs = [torch.nn.Parameter(torch.tensor(v, dtype=torch.float32)) for v in start()]
    reference = getattr(torch.optim, CLASSES[kind].__name__)(theirs, **settings)
    params = leaves(start(), np.float32)
    optimizer = CLASSES[kind](params, **settings)
    for step in range(STEPS):
        for ours, p, g in zip(params, theirs, gradients(step), strict=True):
            ours.grad, p.grad = mt.tensor(g), torch.tensor(g)
        optimizer.step()
        reference.step()
    close(params, [p.detach().numpy() for p in theirs], 1e-6)


@pytest.mark.parametrize("bits", [32, 8])
@pytest.mark.parametrize("eps, dtype", [(0.0, np.float32), (0.0, np.float64), (1e-60, np.float32), (0, np.float16)])
def test_without_an_eps_the_padding_stays_0(eps, dtype, bits):
    """0/0 there would be NaN, in clipping, norms and digests of whole buffers; where a parameter never had a gradient
    it is what torch gives. Each step is lr · m̂/√v̂, by hand."""
    shapes = [(3, 7), (16,), (5,), (2, 16)]
    rng = np.random.default_rng(4)
    first = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    params = [mt.tensor(values, dtype, requires_grad=True) for values in first]
    optimizer = optim.AdamW(params, lr=0.25, eps=eps, betas=(0.5, 0.75), weight_decay=0.5, state_bits=bits)
    gradients = [rng.choice([-2.0, 2.0], shape) for shape in shapes]
    gradients[1][3] = 0
    for _ in range(2):
        for p, g in zip(params, gradients, strict=True):
            p.grad = mt.tensor(g, dtype)
        with np.errstate(invalid="ignore"):
            optimizer.step()
    for flat, slots in zip(optimizer.flats, optimizer.slots, strict=True):
        for s, end in [(slot.segment, slot.segment.end) for slot in slots] + [(slots[-1].segment, flat.size)]:
            assert not flat.params[s.stop:end].any(), s     # NaN counts as something
    for p, values, g in zip(params, first, gradients, strict=True):
        with np.errstate(invalid="ignore"):
            wanted = values.astype(np.float64)
            for _ in range(2):      # m̂ = g and √v̂ = |g|
                wanted = wanted * (1 - 0.25 * 0.5) - 0.25 * g / abs(g)
        np.testing.assert_allclose(p.numpy(), wanted, rtol=2 ** -11 * 1.01 if dtype == np.float16 else 1e-5)
    assert np.isnan(params[1].numpy()).sum() == 1


@pytest.mark.parametrize(("kind", "settings"), [
    ("sgd", {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}), ("adam", {}), ("adamw", {"weight_decay": 0.3})])
def test_a_parameter_without_gradient_rests(kind, settings):
    """Parameter k has a gradient in every (k+1)-th step only; in between it doesn't move, nor does its step count."""
    wanted = start()
    references = [Reference(kind, **settings) for _ in wanted]
    params = leaves(start(), np.float64)
    optimizer = CLASSES[kind](params, **settings)
    for step in range(24):
        optimizer.zero_grad()
        for k, g in enumerate(gradients(step, dtype=np.float64)):
            if step % (k + 1) == 0:
                params[k].grad = mt.tensor(g)
                wanted[k] = np.asarray(references[k].step(wanted[k], g))
        before = [p.numpy().copy() for p in params]
        optimizer.step()
        for k, p in enumerate(params):
            if step % (k + 1):
                assert p.grad is None and (p.numpy() == before[k]).all()
    close(params, wanted, 1e-13)
    assert optimizer.state_dict()["steps"] == [len(range(0, 24, k + 1)) for k in range(len(params))]


def test_groups_have_their_own_settings():
    wanted = start()
    a, b, c, *rest = params = leaves(start(), np.float64)
    optimizer = optim.SGD([{"params": [c, a], "lr": 0.5, "momentum": 0.9}, {"params": b, "weight_decay": 0.1},
                           {"params": iter(rest)}], lr=0.01)
    settings = [{"lr": 0.5, "momentum": 0.9}, {"lr": 0.01, "weight_decay": 0.1}, {"lr": 0.5, "momentum": 0.9},
                *[{"lr": 0.01}] * len(rest)]
    references = [Reference("sgd", **s) for s in settings]
    for step in range(5):
        optimizer.zero_grad()
        grads = gradients(step, dtype=np.float64)
        through_backward(params, grads)
        optimizer.step()
        wanted = [np.asarray(r.step(w, g)) for r, w, g in zip(references, wanted, grads, strict=True)]
    close(params, wanted, 1e-13)
    assert optimizer.lr == 0.5
    optimizer.zero_grad()
    assert all(p.grad is None for p in params)


def test_two_dtypes_live_side_by_side():
    values = start([(5, 3), (7,)])
    params = [*leaves(values[:1], np.float32), *leaves(values[1:], np.float64)]
    optimizer = optim.Adam(params, lr=0.1)
    wanted = [Reference("adam", lr=0.1).step(v, np.full(v.shape, 0.7)) for v in values]
    for p in params:
        p.grad = mt.tensor(np.full(p.shape, 0.7, p.dtype))
    optimizer.step()
    close(params[:1], wanted[:1], 1e-7)
    close(params[1:], wanted[1:], 1e-15)


def test_parameters_come_as_tensors_pairs_or_a_dict():
    model = mt.nn.Sequential(mt.nn.Linear(3, 2), mt.nn.Linear(2, 1, bias=False))
    wanted = list(model.parameters())
    for given in (model.parameters(), model.named_parameters(), dict(model.named_parameters()),
                  [{"params": model.named_parameters()}]):
        optimizer = optim.SGD(given)
        assert [p for group in optimizer.param_groups for p in group["params"]] == wanted
        assert optimizer.param_groups[0]["lr"] == 1e-3


@pytest.mark.parametrize("kind", CLASSES)
def test_gradients_stay_as_they_are_and_padding_stays_zero(kind):
    params = leaves(start(), np.float32)
    optimizer = CLASSES[kind](params, lr=0.1, weight_decay=0.1)
    grads = gradients(0)
    through_backward(params, grads)
    optimizer.step()
    flat, = optimizer.flats
    inside = np.zeros(flat.size, bool)
    for p, g, s in zip(params, grads, flat.segments, strict=True):
        assert (p.grad.numpy() == g).all()
        inside[s.start:s.stop] = True
    for array in (flat.params, flat.grads, *optimizer.state[0].values()):
        assert (array[~inside] == 0).all()


def test_neighbours_are_updated_in_one_go():
    params = leaves(start(), np.float32)
    optimizer = optim.Adam(params)
    for resting, launches in ((None, 1), (0, 1), (1, 2)):
        optimizer = optim.Adam(params)
        through_backward(params, gradients(0))
        if resting is not None:
            params[resting].grad = None
        with ledger.record() as book:
            optimizer.step()
        assert book.launches["adam"] == launches


def test_backward_through_updated_parameters_raises():
    p, = leaves([np.ones(3)], np.float32)
    optimizer = optim.SGD([p], lr=0.1)
    y = (p * p).sum()
    p.grad = mt.tensor(np.ones(3, np.float32))
    optimizer.step()
    with pytest.raises(RuntimeError, match="SGD.step"):
        y.backward()


@pytest.mark.parametrize("kind", [optim.Adam, lambda params: optim.SGD(params, lr=0.1, momentum=0.9)])
def test_state_follows_parameters_that_move(kind):
    """Moving the parameters to another flat buffer, in another order, between two steps changes nothing."""
    from minitorch_dist.flat import FlatBuffer
    finals = []
    for moves in (False, True):
        params = leaves(start(), np.float64)
        optimizer = kind(params)
        for k in range(4):
            if moves and k == 2:
                FlatBuffer(params[::-1])
            through_backward(params, gradients(k))
            optimizer.step()
        assert not moves or optimizer.flats[0].segments[0].tensor is params[-1]
        finals.append([p.numpy().copy() for p in params])
    for stayed, moved in zip(*finals, strict=True):
        assert (stayed == moved).all()


@pytest.mark.parametrize(("make", "says"), [
    (lambda p: optim.SGD([]), "at least one"),
    (lambda p: optim.SGD([p, p]), "twice"),
    (lambda p: optim.SGD([{"params": [p]}, {"params": [p]}]), "two groups"),
    (lambda p: optim.SGD([p * 2.0]), r"\(3,\)"),
    (lambda p: optim.SGD([mt.tensor([1.0])]), "require grad"),
    (lambda p: optim.SGD([p], lr=-1), "lr is -1"),
    (lambda p: optim.SGD([p], lr="0.1"), "lr is '0.1'; it must be at least 0"),
    (lambda p: optim.Adam([p], lr=None), "lr is None; it must be at least 0"),
    (lambda p: optim.Adam([p], lr=np.ones(2)), "lr is array.*; it must be at least 0"),
    (lambda p: optim.Adam([p], betas=0.9), "betas is 0.9; it must be two numbers"),
    (lambda p: optim.LAMB([p], betas=None), "betas is None; it must be two numbers"),
    *((lambda p, order=order: optim.SGD([{"params": [p]}, nn.Parameter(np.ones(2))][::order]), "got both: put those")
      for order in (1, -1)),
    (lambda p: optim.AdamW([p], betas=("a", 0.9)), r"betas is \('a', 0.9\); it must be two numbers"),
    (lambda p: optim.SGD([p], momentum=-0.1), "momentum"),
    (lambda p: optim.SGD([p], nesterov=True), "nesterov"),
    (lambda p: optim.SGD([p], weight_decay=-1), "weight_decay"),
    (lambda p: optim.SGD([{"params": [p], "nesterov": True}]), "nesterov"),
    (lambda p: optim.AdamW([{"params": [p], "weight_decay": -1}], lr=1.0), "weight_decay is -1"),
    (lambda p: optim.AdamW([{"params": [p], "betas": (0.9, 1.0)}]), "betas"),
    (lambda p: optim.SGD([{"params": [p], "weight_dacay": 1}]), "has weight_dacay, and its settings are lr, mom"),
    (lambda p: optim.Muon([{"params": leaves([np.ones((2, 2))], np.float32), "ns_steps": 1.5}]), "is 1.5"),
    (lambda p: optim.SGD(nn.Sequential(nn.Linear(2, 3))), "got a Linear: of a model its parameters"),
    (lambda p: optim.SGD(nn.Linear(2, 3)), "got a Linear: of a model its parameters"),
    (lambda p: optim.SGD([{"param": [p]}]), 'with its "params", which one of param hasn'),
    (lambda p: optim.Adam([p], lr=float("nan")), "lr is nan"),
    (lambda p: optim.Adam([p], betas=(0.9, 1.0)), "betas"),
    *((lambda p, betas=betas: optim.AdamW([{"params": [p], "betas": betas}]), "betas is .* must be two numbers")
      for betas in ((), (0.9,), (0.9, 0.99, 0.999), 0.9)),
    (lambda p: optim.AdamW([p], eps=-1e-8), "eps"),
    (lambda p: optim.Adagrad([p], eps=0.0), "eps is 0.0; it must be more than 0"),
    (lambda p: optim.Adagrad([p, *leaves([np.ones(2)], np.float16)], eps=1e-50), "eps=1e-50 is 0 in float32"),
])
def test_what_does_not_fit_raises(make, says):
    p, = leaves([np.ones(3)], np.float32)
    with pytest.raises((ValueError, TypeError), match=says):
        make(p)


@pytest.mark.parametrize(("kind", "settings"), [
    ("SGD", {"momentum": 0}), ("Adam", {"betas": (0, 0), "eps": 0}), ("AdamW", {"betas": [0, 0], "eps": 0}),
    ("Adagrad", {"lr_decay": 0, "initial_accumulator_value": 0}), ("LAMB", {"betas": (0, 0)}),
    ("LARS", {"momentum": 0}), ("Lion", {"betas": (0, 0)}), ("Muon", {"momentum": 0, "ns_steps": 1}),
    ("Muon", {"ns_steps": 99, "ns_coefficients": (1.5, -0.5, 0)}), ("Dion2", {"momentum": 0, "fraction": 1}),
    ("Dion2", {"fraction": 1e-300}), ("Dion", {"rank_fraction": 1e-300, "momentum": 0}), ("Dion", {"rank_fraction": 1}),
    ("NorMuon", {"beta2": 0, "momentum": 0}),
    ("Adafactor", {"beta2_decay": 0, "eps": (1e-9, 0), "d": 1}), ("AdamWScheduleFree", {"betas": (1, 0), "warmup": 0})])
def test_what_just_fits(kind, settings):
    p, = leaves([np.ones((2, 3))], np.float32)
    optimizer = getattr(optim, kind)([p], **{"lr": 0, "weight_decay": 0, **settings})
    for optimizer.param_groups[0]["lr"] in (0, 0.5):
        p.grad = mt.tensor(np.ones((2, 3), np.float32))
        optimizer.step()
        assert np.isfinite(p.numpy()).all() and (p.numpy() == 1).all() == (optimizer.lr == 0)


# ---------------------------------------------------------------- state

def train(params, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        for k, (p, g) in enumerate(zip(params, gradients(step), strict=True)):
            if k != 1 or step % 2:      # the second parameter rests now and then: its step count is its own
                p.grad = mt.tensor(g)
        optimizer.step()


@pytest.mark.parametrize("name", ["nesterov decay", "adam decay", "adamw"])
def test_a_restored_run_continues_bit_for_bit(name):
    kind, settings = SETTINGS[name]
    params = leaves(start(), np.float32)
    optimizer = CLASSES[kind](params, **settings)
    train(params, optimizer, range(5))
    saved, values = optimizer.state_dict(), [p.numpy().copy() for p in params]
    train(params, optimizer, range(5, 10))

    for layout in ("the same", "other storage"):
        twins = leaves(values, np.float32)
        if layout == "other storage":       # state is kept per parameter, not per buffer
            from minitorch_dist.flat import FlatBuffer
            FlatBuffer(twins[3:][::-1])
        other = CLASSES[kind](twins, lr=123.0)
        other.load_state_dict(saved)
        train(twins, other, range(5, 10))
        for p, twin in zip(params, twins, strict=True):
            assert p.numpy().tobytes() == twin.numpy().tobytes(), layout


def test_whether_it_goes_up_is_a_groups_affair_and_saved():
    up, down = leaves([np.ones(3), np.ones(3)], np.float32)
    adam = optim.Adam([{"params": [up], "maximize": True}, {"params": [down]}], lr=0.1)
    other = leaves([np.ones(3), np.ones(3)], np.float32)
    restored = optim.Adam([{"params": [p]} for p in other], lr=0.1)
    restored.load_state_dict(adam.state_dict())
    for p in (up, down, *other):
        p.grad = mt.tensor(np.ones(3, np.float32))
    adam.step()
    restored.step()
    np.testing.assert_allclose([p.numpy() for p in (up, down, *other)], [[x] * 3 for x in (1.1, 0.9, 1.1, 0.9)])


def test_state_dict_is_a_copy_and_speaks_in_parameters():
    params = leaves(start(), np.float32)
    optimizer = optim.Adam([{"params": params[2:]}, {"params": params[:2], "lr": 0.5}])
    train(params, optimizer, range(2))
    state = optimizer.state_dict()
    assert [a["exp_avg"].shape for a in state["state"]] == [*SHAPES[2:], *SHAPES[:2]]
    assert state["steps"] == [2] * 6 + [1] and state["groups"][1]["lr"] == 0.5 and "params" not in state["groups"][0]
    g0, g1 = (gradients(step)[0].astype(np.float64) for step in range(2))
    np.testing.assert_allclose(state["state"][-2]["exp_avg"], 0.1 * (0.9 * g0 + g1), atol=1e-7)
    state["state"][0]["exp_avg"][...] = 99
    assert not (optimizer.state[0]["exp_avg"] == 99).any()


def test_state_that_does_not_fit_changes_nothing():
    params = leaves(start([(3, 2), (4,)]), np.float32)
    optimizer = optim.Adam(params, lr=0.1)
    for p in params:
        p.grad = mt.tensor(np.ones(p.shape, np.float32))
    optimizer.step()
    before = optimizer.state_dict()

    def of(*shapes, make=optim.Adam, dtype=np.float32):
        return make(leaves(start(shapes), dtype), lr=7.0).state_dict()
    for wrong in (of((3, 2)), of((2, 3), (4,)), of((3, 2), (5,)), of((3, 2), (4,), make=optim.SGD),
                  of((3, 2), (4,), dtype=np.float64)):
        with pytest.raises(ValueError, match="saved|parameters"):
            optimizer.load_state_dict(wrong)
    after = optimizer.state_dict()
    assert (after["groups"], after["steps"]) == (before["groups"], before["steps"])
    for a, b in zip(after["state"], before["state"], strict=True):
        assert all((a[name] == b[name]).all() for name in b)


def test_the_ledger_counts_parameters_gradients_and_state_by_kind():
    """Mixed precision aside, Adam holds ψ elements of parameters, ψ of gradients and 2ψ of its own (ZeRO's K)."""
    w = mt.tensor(np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32), requires_grad=True)
    adam = optim.Adam([w])
    with ledger.record(memory=True) as book:
        (w * w).sum().backward()
        adam.step()
        psi = 4 * w.size        # bytes; 64·128 is a whole number of blocks, so there is no padding
        assert (book.live["parameter"], book.live["gradient"], book.live["optimizer"]) == (psi, psi, 2 * psi)


@pytest.mark.parametrize("damage, words", [
    (lambda s: {}, "has no class, groups, sizes, steps, state"),
    (lambda s: {k: v for k, v in s.items() if k != "sizes"}, "has no sizes"),
    (lambda s: s | {"groups": []}, "settings of 0 groups, and parameters of 1"),
    (lambda s: s | {"steps": [7]}, "2 parameters, with 1 numbers of steps")], ids=["empty", "sizes", "groups", "steps"])
def test_damaged_state_is_refused_and_nothing_changes(damage, words):
    optimizer = optim.SGD([mt.tensor(np.ones(n), requires_grad=True) for n in (3, 2)], lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(damage(optimizer.state_dict()))
    assert optimizer.state_dict()["steps"] == [0, 0]
    optimizer.load_state_dict(optimizer.state_dict() | {"sizes": (2,), "steps": (4, 5)})
    assert optimizer.state_dict()["steps"] == [4, 5]


def test_frozen_parameters_are_to_be_left_out():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    with pytest.raises(ValueError, match=r"shape \(3, 2\) is not. Where some are frozen: \[p for p in"):
        optim.SGD(model.parameters(), 0.1)
    optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
