"""Muon against singular value decompositions; Combined against its optimizers alone."""

import itertools

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import ledger, nn, optim
from minitorch_dist.flat import FlatBuffer
from minitorch_dist.optim.matrices import owners, work
from minitorch_dist.optim.muon import COEFFICIENTS, orthogonalized

SHAPES = [(7, 11), (31, 5), (13, 13), (1, 6), (4, 9, 5)]


def start(shapes=SHAPES, seed=0):
    random = np.random.default_rng(seed)
    return [0.1 * random.standard_normal(shape) for shape in shapes]


def gradients(step, shapes=SHAPES):
    """With singular values from 1 to 1e-4 of the greatest."""
    random, found = np.random.default_rng([step, 99]), []
    for shape in shapes:
        u, s, vt = np.linalg.svd(random.standard_normal(shape), full_matrices=False)
        found.append((u * np.logspace(0, -4, s.shape[-1])) @ vt)
    return found


def leaves(values, dtype=np.float64):
    return [mt.tensor(v.astype(dtype), requires_grad=True) for v in values]


def by_svd(u, coefficients=COEFFICIENTS, steps=5, eps=1e-7):
    """What `orthogonalized` must give: its polynomial, of each singular value by itself."""
    a, b, c = coefficients
    left, s, right = np.linalg.svd(u, full_matrices=False)
    s = s / np.maximum(np.sqrt((s * s).sum(-1, keepdims=True)), eps)
    for _ in range(steps):
        s = a * s + b * s ** 3 + c * s ** 5
    return (left * s[..., None, :]) @ right


class Reference:
    """One parameter's Muon as its paper writes it, in float64."""

    def __init__(self, lr=1e-3, weight_decay=0.1, momentum=0.95, nesterov=True, adjust_lr_fn=None, ns_steps=5, eps=1e-7,
                 ns_coefficients=COEFFICIENTS):
        self.lr, self.decay, self.momentum, self.nesterov = lr, weight_decay, momentum, nesterov
        self.adjust = adjust_lr_fn
        self.ns, self.b = (ns_coefficients, ns_steps, eps), 0.0

    def step(self, p, g):
        self.b = self.momentum * self.b + g
        o = by_svd(g + self.momentum * self.b if self.nesterov else self.b, *self.ns)
        rows, columns = p.shape if p.ndim == 2 else p.shape[:0:-1]
        scale = 0.2 * max(rows, columns) ** 0.5 if self.adjust == "match_rms_adamw" else max(1, rows / columns) ** 0.5
        return p - self.lr * self.decay * p - self.lr * scale * o


SETTINGS = [{"lr": 0.02}, {"lr": 0.01, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.3},
            {"lr": 0.02, "momentum": 0.8, "nesterov": False, "weight_decay": 0.0, "adjust_lr_fn": "original"},
            {"lr": 0.02, "ns_steps": 3, "ns_coefficients": (1.5, -0.5, 0.0), "eps": 3.0}]


@pytest.mark.parametrize(("settings", "dtype"), list(itertools.product(SETTINGS, [np.float32, np.float64])))
def test_twenty_steps_are_the_papers(settings, dtype):
    wanted = [v.astype(dtype).astype(np.float64) for v in start()]
    references, params = [Reference(**settings) for _ in wanted], leaves(start(), dtype)
    optimizer = optim.Muon(params, **settings)
    for step in range(20):
        for k, (p, g) in enumerate(zip(params, gradients(step), strict=True)):
            p.grad = mt.tensor(g.astype(dtype))
            wanted[k] = references[k].step(wanted[k], g.astype(dtype).astype(np.float64))
        optimizer.step()
    for p, w, v in zip(params, wanted, start(), strict=True):
        assert np.abs(w - v).max() > 0.02 and p.dtype == dtype
        np.testing.assert_allclose(p.numpy(), w, rtol=0, atol=1e-3 * 0.02 if dtype == np.float32 else 1e-11)


def test_twenty_steps_are_torchs():
    torch = pytest.importorskip("torch", minversion="2.9")
    for settings in SETTINGS:
        theirs = [torch.nn.Parameter(torch.tensor(v, dtype=torch.float32)) for v in start(SHAPES[:4])]
        # Its momentum, of which eps is the least norm, is (1 - momentum) times ours.
        eps = settings.get("eps", 1e-7) * (1 - settings.get("momentum", 0.95))
        reference = torch.optim.Muon(theirs, **settings | {"eps": eps})
        params = leaves(start(SHAPES[:4]), np.float32)
        optimizer = optim.Muon(params, **settings)
        for step in range(20):
            for ours, p, g in zip(params, theirs, gradients(step, SHAPES[:4]), strict=True):
                ours.grad, p.grad = mt.tensor(g.astype(np.float32)), torch.tensor(g, dtype=torch.float32)
            optimizer.step()
            reference.step()
        for ours, p in zip(params, theirs, strict=True):        # its products are in bfloat16
            np.testing.assert_allclose(ours.numpy(), p.detach().numpy(), rtol=0, atol=20 * settings["lr"] * 0.05)


@pytest.mark.parametrize("shape", [(5, 5), (3, 40), (40, 3), (6, 9, 4), (1, 1)])
def test_directions_come_out_alike(shape):
    """A condition number of 100 becomes one below 2, and no direction turns."""
    u, s, vt = np.linalg.svd(np.random.default_rng(1).standard_normal(shape), full_matrices=False)
    s = np.logspace(0, -2, s.shape[-1])
    found = orthogonalized(7.0 * (u * s) @ vt)
    assert found.flags.c_contiguous
    inside = u.swapaxes(-1, -2) @ found @ vt.swapaxes(-1, -2)
    diagonal = np.diagonal(inside, axis1=-2, axis2=-1)
    assert ((0.68 < diagonal) & (diagonal < 1.21)).all()
    np.testing.assert_allclose(inside - diagonal[..., None] * np.eye(diagonal.shape[-1]), 0, atol=1e-12)


def test_the_bounds_in_the_docstring():
    a, b, c = COEFFICIENTS
    before = s = np.logspace(-6, 0, 100_001)
    for _ in range(5):
        s = a * s + b * s ** 3 + c * s ** 5
    assert s[before >= 0.003].min() > 0.68 and s.max() < 1.21 and (s / before).max() < 485


def test_no_gradient_no_step_and_zeros_stay_zeros():
    a, b = params = leaves(start(SHAPES[:2]))
    optimizer = optim.Muon(params, weight_decay=0.0)
    a.grad = mt.tensor(np.zeros(a.shape))
    before = [p.numpy().copy() for p in params]
    optimizer.step()
    assert all((p.numpy() == v).all() for p, v in zip(params, before, strict=True))
    assert optimizer.state_dict()["steps"] == [1, 0]


def test_gradients_of_16_bits_have_float32_momentum():
    p, = leaves(start([(6, 4)]), np.float16)
    optimizer = optim.Muon([p], lr=0.1)
    g = gradients(0, [(6, 4)])[0].astype(np.float16)
    p.grad = mt.tensor(g)
    wanted = Reference(lr=0.1).step(p.numpy().astype(np.float64), g.astype(np.float64))
    optimizer.step()
    assert optimizer.state[0]["momentum_buffer"].dtype == np.float32 and p.dtype == np.float16
    np.testing.assert_allclose(p.numpy(), wanted, rtol=0, atol=2 ** -11)


@pytest.mark.parametrize(("settings", "says"), [
    ({"lr": -1}, "lr is -1"), ({"momentum": -0.1}, "momentum"), ({"eps": 0}, "eps is 0; it must be more than 0"),
    ({"ns_steps": 100}, "ns_steps is 100"), ({"ns_steps": 2.5}, "ns_steps"), ({"weight_decay": -1}, "weight_decay"),
    ({"ns_coefficients": (1, 2)}, "three numbers"), ({"adjust_lr_fn": "adam"}, "None, original or match_rms_adamw")])
def test_settings_out_of_range_raise(settings, says):
    with pytest.raises(ValueError, match=says):
        optim.Muon(leaves(start()), **settings)


def test_what_is_no_matrix_raises():
    for shape in ((3,), (), (2, 3, 4, 5)):
        with pytest.raises(ValueError, match="neither a matrix nor a stack"):
            optim.Muon(leaves([np.ones(shape)]))


def test_backward_through_updated_parameters_raises():
    p, = leaves([np.ones((2, 3))])
    optimizer = optim.Muon([p])
    y = (p * p).sum()
    p.grad = mt.tensor(np.ones((2, 3)))
    optimizer.step()
    with pytest.raises(RuntimeError, match="Muon.step"):
        y.backward()


# ---------------------------------------------------------------- matrices on several ranks

def test_each_rank_owns_its_share_of_the_work():
    random = np.random.default_rng(0)
    for ranks in (1, 2, 3, 7):
        shapes = [tuple(random.integers(1, 50, 2)) for _ in range(40)]
        load = [0] * ranks
        for shape, owner in zip(shapes, owners(shapes, ranks), strict=True):
            load[owner] += work(shape)
        assert sum(load) == sum(map(work, shapes))
        assert max(load) - min(load) <= max(map(work, shapes))
    assert owners([(2, 2)] * 4 + [(40, 30), (3, 3)], 2) == [1, 1, 1, 1, 0, 1]
    assert work((3, 5)) == work((5, 3)) == 3 * 3 * 5 + 3 * 3 * 3 + 3 * 3 * 5       # XXᵀ, its square, times X
    assert work((7, 3, 5)) == 7 * work((3, 5)) and owners([], 3) == []


# ---------------------------------------------------------------- Combined

def model_of(dtype=np.float64):
    mt.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 9, dtype=dtype), nn.Tanh(), nn.Linear(9, 4, dtype=dtype))


def split(model):
    params = list(model.parameters())
    return [p for p in params if p.ndim == 2], [p for p in params if p.ndim != 2]


def both(model):
    matrices, vectors = split(model)
    return optim.Combined(optim.Muon(matrices, lr=0.02), optim.AdamW([{"params": vectors}], lr=3e-3))


def fit(model, step_of, steps, zero_grad):
    random = np.random.default_rng(5)
    x, y = random.standard_normal((8, 6)), random.standard_normal((8, 4))
    for step in steps:
        zero_grad()
        ((model(x * np.cos(step)) - y) ** 2).sum().backward()
        step_of()


def values(model):
    return [p.numpy().copy() for p in model.parameters()]


@pytest.mark.parametrize("flat", [False, True])
def test_two_as_one_take_the_steps_that_each_takes(flat):
    one, two = model_of(), model_of()
    for model in (one, two) if flat else ():
        FlatBuffer(model.parameters())          # as DistributedDataParallel's buckets: both in one
    combined = both(one)
    muon, adamw = optim.Muon(split(two)[0], lr=0.02), optim.AdamW(split(two)[1], lr=3e-3)
    fit(one, combined.step, range(6), combined.zero_grad)
    fit(two, lambda: (muon.step(), adamw.step()), range(6), two.zero_grad)
    for a, b in zip(values(one), values(two), strict=True):
        assert a.tobytes() == b.tobytes()
    assert combined.lr == 0.02 and [g["lr"] for g in combined.param_groups] == [0.02, 3e-3]
    assert all(p.grad is not None for p in one.parameters())
    combined.zero_grad()
    assert all(p.grad is None for p in one.parameters())


def test_a_restored_run_continues_bit_for_bit():
    model = model_of()
    optimizer = both(model)
    fit(model, optimizer.step, range(4), optimizer.zero_grad)
    saved, then = optimizer.state_dict(), model.state_dict()
    fit(model, optimizer.step, range(4, 8), optimizer.zero_grad)
    other = model_of()
    other.load_state_dict(then)
    again = both(other)
    again.load_state_dict(saved)
    fit(other, again.step, range(4, 8), again.zero_grad)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(values(model), values(other), strict=True))


def test_state_that_does_not_fit_changes_nothing():
    model = model_of()
    optimizer = both(model)
    fit(model, optimizer.step, range(2), optimizer.zero_grad)
    before = optimizer.state_dict()
    few, many = ({key: entries[:-1] for key, entries in before.items()},
                 {key: entries + entries[-1:] for key, entries in before.items()})
    swapped = {**before, "state": before["state"][::-1]}
    for wrong in (few, many, swapped):
        wrong = {**wrong, "steps": [99] * len(wrong["steps"])}
        with pytest.raises(ValueError):
            optimizer.load_state_dict(wrong)
    after = optimizer.state_dict()
    assert after["steps"] == before["steps"] == [2] * 4 and after["groups"] == before["groups"]


def test_a_schedule_and_a_scaler_move_both():
    model = model_of(np.float32)
    optimizer = both(model)
    schedule = optim.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    schedule.step()
    assert [g["lr"] for g in optimizer.param_groups] == [0.01, 1.5e-3]
    scaler, twin = optim.GradScaler(init_scale=2.0 ** 10), model_of(np.float32)
    alone = both(twin)
    optim.LambdaLR(alone, lambda step: 0.5)
    x = np.random.default_rng(0).standard_normal((5, 6), np.float32)
    for m, loss in ((model, scaler.scale((model(x) ** 2).sum())), (twin, (twin(x) ** 2).sum())):
        m.zero_grad()
        loss.backward()
    scaler.step(optimizer)
    scaler.update()
    alone.step()
    assert all(a.tobytes() == b.tobytes() for a, b in zip(values(model), values(twin), strict=True))


def test_the_state_of_others_is_not_taken():
    """Adam and AdamW keep arrays of the same names."""
    a, b = (mt.tensor(np.ones(3), requires_grad=True) for _ in range(2))
    saved = optim.Combined(optim.Adam([a]), optim.AdamW([b])).state_dict()
    with pytest.raises(ValueError, match=r"of Combined\(Adam, AdamW\), this optimizer is Combined\(AdamW, Adam\)"):
        optim.Combined(optim.AdamW([a]), optim.Adam([b])).load_state_dict(saved)


def test_what_can_not_be_combined_raises():
    a, b = leaves(start(SHAPES[:2]))
    with pytest.raises(ValueError, match="two of these"):
        optim.Combined(optim.Muon([a, b]), optim.SGD([b]))
    for wrong in ((), ([a],)):
        with pytest.raises(TypeError, match="takes optimizers"):
            optim.Combined(*wrong)


@pytest.mark.parametrize("kind", [optim.Muon, optim.Adam, optim.SGD, optim.Adagrad])
def test_state_is_as_long_as_what_it_is_of(kind):
    """Of parameters that share their flat buffer with others, an optimizer holds state for its own alone."""
    params = leaves(start([(64, 64), (256, 80), (3, 5), (64, 48)]), np.float32)
    flat = FlatBuffer(params)
    mine = [params[0], params[2], params[3]]
    optimizer = kind(mine)
    sizes = {a.size for arrays in optimizer.state for a in arrays.values()}
    assert sizes == {64 * 64 + 16 + 64 * 48} and flat.size > 24_000
    with ledger.record(memory=True) as book:
        for p in params:
            p.grad = mt.tensor(np.ones(p.shape, np.float32))
        before = params[1].numpy().copy()
        optimizer.step()
    assert (params[1].numpy() == before).all() and not any((p.numpy() == 1).any() for p in mine)
    assert book.peak["optimizer"] == len(optimizer.state_names) * 4 * sizes.pop()


@pytest.mark.parametrize("kind", ["adamw", "sgd", "both"])
def test_parameters_that_have_left_their_buffer_count_where_they_are(kind):
    """Some move to another flat buffer, others stay: steps, clipping and loss scaling are those of one that stays."""
    make = {"adamw": lambda m: optim.AdamW(m.parameters(), lr=0.01), "both": both,
            "sgd": lambda m: optim.SGD(m.parameters(), lr=0.01, momentum=0.9)}[kind]
    finals, norms = [], []
    for moves in (False, True):
        model = model_of()
        optimizer, scaler = make(model), optim.GradScaler(init_scale=4.0)
        for step in range(5):
            if moves and step == 2:
                FlatBuffer([p for p in model.parameters() if p.shape[0] == 9])
            optimizer.zero_grad()
            x = np.random.default_rng(step).standard_normal((8, 6))
            scaler.scale((model(x) ** 2).sum()).backward()
            scaler.unscale_(optimizer)
            norms.append(optim.clip_grad_norm_(model.parameters(), 0.5))
            scaler.step(optimizer)
            scaler.update()
        finals.append(values(model))
        assert sum(map(len, optimizer.slots)) == 4 if kind != "both" else True
    assert norms[:5] == norms[5:]
    assert all(a.tobytes() == b.tobytes() for a, b in zip(*finals, strict=True))


def test_what_has_left_a_buffer_leaves_no_inf_there():
    a, b = leaves(start([(3, 2), (5, 4)]), np.float32)
    optimizer, scaler = optim.Adam([a, b]), optim.GradScaler(init_scale=4.0)
    for p in (a, b):
        p.grad = mt.tensor(np.full(p.shape, np.inf, np.float32))
    scaler.unscale_(optimizer)
    assert scaler.found_inf(optimizer)
    scaler.step(optimizer)
    scaler.update()
    FlatBuffer([a])
    for p in (a, b):
        p.grad = mt.tensor(np.ones(p.shape, np.float32))
    scaler.unscale_(optimizer)
    assert not scaler.found_inf(optimizer)


def test_a_stack_of_experts_takes_the_steps_of_its_linears():
    """nn.Experts hold (n, in, out), a Linear (out, in)."""
    w = start([(8, 4), (8, 4)])
    linears, experts = leaves(w), leaves([np.stack([v.T for v in w])])
    for adjust in (None, "match_rms_adamw"):
        one, other = optim.Muon(linears, lr=0.1, adjust_lr_fn=adjust), optim.Muon(experts, lr=0.1, adjust_lr_fn=adjust)
        g = gradients(0, [(8, 4), (8, 4)])
        for p, each in zip(linears, g, strict=True):
            p.grad = mt.tensor(each)
        experts[0].grad = mt.tensor(np.stack([each.T for each in g]))
        one.step()
        other.step()
        for p, found in zip(linears, experts[0].numpy(), strict=True):
            np.testing.assert_allclose(found.T, p.numpy(), rtol=1e-12)


def test_matrices_without_elements_and_settings_of_groups():
    for shape in ((3, 0), (0, 3)):
        p, = leaves([np.zeros(shape)])
        p.grad = mt.tensor(np.zeros(shape))
        optim.Muon([p]).step()
    with pytest.raises(ValueError, match="adjust_lr_fn is 'foo'"):
        optim.Muon([{"params": leaves(start(SHAPES[:1])), "adjust_lr_fn": "foo"}])
