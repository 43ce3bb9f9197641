"""Mixture of experts against slow loops, the one-hot einsum of the papers, and finite differences."""

import contextlib
import copy
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minitorch_dist as mt
from minitorch_dist import ledger, nn, optim
from minitorch_dist.nn import moe

random = np.random.default_rng


def layer(size=5, hidden=7, experts=4, dtype=np.float64, **arguments):
    mt.manual_seed(3)
    return nn.MoE(size, hidden, experts, dtype=dtype, std=0.5, **arguments)


# ---------------------------------------------------------------- routing

def routed(logits, k, capacity):
    """[per token: [(expert, slot, kept, gate)]] of one group, one token at a time."""
    chosen, gates = [], []
    for row in logits:
        best = sorted(range(len(row)), key=lambda e: (-row[e], e))[:k]
        p = [math.exp(v - max(row)) for v in row]
        whole = sum(p[e] for e in best) if k > 1 else sum(p)
        chosen.append(best)
        gates.append([p[e] / whole for e in best])
    taken, found = [0] * len(logits[0]), [[None] * k for _ in logits]
    for choice in range(k):         # nobody's second choice comes before anybody's first
        for token, best in enumerate(chosen):
            e = best[choice]
            found[token][choice] = e, taken[e], taken[e] < capacity, gates[token][choice]
            taken[e] += 1
    return found


@st.composite
def routings(draw):
    """(logits (groups, tokens, experts), k, capacity or None), with ties, and with all tokens going to one expert."""
    groups, tokens, experts = draw(st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 5)))
    size = groups * tokens * experts
    numbers = draw(st.one_of(st.lists(st.integers(-2, 2), min_size=size, max_size=size),
                             st.lists(st.floats(-30, 30), min_size=size, max_size=size)))
    logits = np.array(numbers, np.float64).reshape(groups, tokens, experts)
    if draw(st.booleans()):
        logits[..., draw(st.integers(0, experts - 1))] = 40
    return logits, draw(st.integers(1, experts)), draw(st.one_of(st.none(), st.integers(1, tokens + 1)))


@settings(max_examples=150, deadline=None)
@given(routings())
def test_routing_is_that_of_a_slow_loop(case):
    logits, k, capacity = case
    groups, tokens, experts = logits.shape
    found = moe.route(logits, k, capacity)
    if capacity is None:
        assert found.counts == tuple((found.expert == e).sum() for e in range(experts))
        assert np.repeat(np.arange(experts), found.counts).tolist() == found.expert.reshape(-1)[np.argsort(
            found.places.reshape(-1))].tolist()
        capacity = groups * tokens
    for g in range(groups):
        for s, choices in enumerate(routed(logits[g].tolist(), k, capacity)):
            for c, (expert, slot, kept, gate) in enumerate(choices):
                assert (found.expert[g, s, c], found.slot[g, s, c], found.kept[g, s, c]) == (expert, slot, kept)
                assert abs(found.gates[g, s, c] - gate) < 1e-14
    # every kept choice has a row of its own, from which its token is found again, and the other rows are empty
    rows = found.places[found.kept]
    number = np.broadcast_to(np.arange(groups * tokens).reshape(groups, tokens, 1), found.kept.shape)
    assert len(set(rows.tolist())) == rows.size and (found.places[~found.kept] == len(found.sources)).all()
    assert len(found.sources) == found.rows and (found.sources[rows] == number[found.kept]).all()
    assert (found.sources != groups * tokens).sum() == rows.size
    filled = [min(capacity, (found.expert[g] == e).sum()) for g in range(groups) for e in range(experts)]
    assert found.kept.sum() == sum(filled)


def test_a_routing_prints():
    logits = np.log([[[6, 1, 3], [1, 5, 4], [7, 2, 1]]])
    assert str(moe.route(logits, 2, 1)) == """\
3 experts of capacity 1, 3 of 6 choices kept
group token  expert.slot gate
    0     0       0.0   0.667       2.0   0.333
    0     1       1.0   0.556       2 dropped
    0     2       0 dropped         1 dropped"""


@pytest.mark.parametrize(("tokens", "experts", "k", "factor", "capacity"), [
    (10, 4, 2, 1.25, 7), (8, 4, 2, 1.0, 4), (100, 20, 2, 1.1, 11), (10, 4, 1, 1.25, 4), (3, 8, 1, 1.0, 1),
    (6, 3, 2, 4.0, 6), (5, 1, 1, 1.0, 5)])
def test_capacity_is_rounded_up(tokens, experts, k, factor, capacity):
    """1.1 in binary is a little more: rounded up it would be 12."""
    assert moe.capacity_of(tokens, experts, k, factor) == capacity


# ---------------------------------------------------------------- the layer

def by_einsum(model, x, capacity):
    """Tokens (tokens, size) of one group through one-hot tensors (tokens, experts, capacity), as in GShard."""
    w = {name: p.numpy() for name, p in model.named_parameters()}
    weights = np.zeros((len(x), len(w["router.weight"]), capacity))
    for s, choices in enumerate(routed((x @ w["router.weight"].T).tolist(), model.k, capacity)):
        for expert, slot, kept, gate in choices:
            if kept:
                weights[s, expert, slot] = gate
    h = np.einsum("sec,sd->ecd", weights > 0, x) @ w["experts.up"]
    h = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h ** 3)))
    return np.einsum("sec,ecd->sd", weights, h @ w["experts.down"])


@pytest.mark.parametrize(("k", "factor", "group"), [(2, 1.0, None), (1, 1.25, None), (3, 0.5, 3), (2, 0.6, "sequence"),
                                                    (4, 1.0, 2), (2, 2.0, 6), (3, None, None), (1, None, "sequence")])
def test_a_layer_is_the_einsum_of_one_hot_tensors(k, factor, group):
    model = layer(k=k, capacity_factor=factor, group=group)
    x = random(1).standard_normal((2, 6, 5))
    size, factor = {None: 12, "sequence": 6}.get(group, group), 4 / k if factor is None else factor
    capacity = min(size, math.ceil(k * factor * size / 4))
    wanted = np.concatenate([by_einsum(model, part, capacity) for part in x.reshape(-1, size, 5)]).reshape(x.shape)
    y, _ = model(x)
    np.testing.assert_allclose(y.numpy(), wanted, rtol=1e-12, atol=1e-13)
    _, routing = model.routing(x)
    assert routing.kept.all() == (factor * k >= 4)
    nowhere = ~routing.kept.any(-1).reshape(2, 6)
    assert not y.numpy()[nowhere].any() and (nowhere.any() or factor >= 1)


def test_groups_are_blind_to_each_other():
    x = random(2).standard_normal((3, 6, 5))
    alone, together = layer(group="sequence", capacity_factor=0.5), layer(capacity_factor=0.5)
    y = alone(x)[0].numpy()
    np.testing.assert_allclose(alone(x[1:2])[0].numpy(), y[1:2], rtol=1e-12)
    assert abs(together(x)[0].numpy() - y).max() > 0.01


def test_dtypes_and_shapes_are_kept():
    model = layer(dtype=np.float32, z=0.1)
    x = mt.tensor(random(3).standard_normal((2, 3, 2, 5)).astype(np.float32), requires_grad=True)
    y, aux = model(x)
    (mt.sum(y) + aux).backward()
    assert y.shape == x.shape and aux.shape == ()
    assert {y.dtype, aux.dtype, x.grad.dtype, *(p.grad.dtype for p in model.parameters())} == {np.dtype(np.float32)}


@pytest.mark.parametrize("amp, near", [("bfloat16", 2e-2), ("float16", 3e-3)])
@pytest.mark.parametrize("factor", [None, 1.0])
def test_under_autocast_rows_are_kept_once_in_16_bits(monkeypatch, factor, amp, near):
    """Near float64's values and gradients, among them those of tokens that 3 experts' rows add up."""
    wide, x = layer(size=16, k=3, capacity_factor=factor, mlp="swiglu"), random(3).standard_normal((7, 9, 16))
    model = copy.deepcopy(wide).to("float32")
    model.router.weight.data[:] = wide.router.weight.data[:] = np.round(8 * wide.router.weight.data) / 8
    x, u = np.round(8 * x) / 8, random(4).standard_normal((7, 9, 16))       # products that choose are exact in 16 bits
    found, kept = [], []
    for each, dtype, lowered in ((model, "float32", lambda x: x), (model, "float32", moe.lowered),
                                 (wide, "float64", lambda x: x)):
        monkeypatch.setattr(moe, "lowered", lowered)
        given = mt.tensor(x.astype(dtype), requires_grad=True)
        each.zero_grad()
        with mt.autocast(amp) if dtype == "float32" else contextlib.nullcontext(), ledger.record(memory=True) as book:
            y, aux = each(given)
            kept.append(book.peak["activation"])
        (mt.sum(y * u.astype(dtype)) + aux).backward()
        found.append([y.numpy(), given.grad.numpy(), *(p.grad.numpy() for p in each.parameters())])
    for got, wanted in zip(*found[1:], strict=True):
        assert got.dtype == np.float32 and np.linalg.norm(got - wanted) < near * np.linalg.norm(wanted)
    assert kept[0] - kept[1] == model.routing(x)[1].rows * 16 * 2      # gate and up have one copy together


@pytest.mark.parametrize("k", [1, 2])
def test_derivatives_equal_finite_differences_to_second_order(k):
    """By tokens, router and experts; some choices are dropped, none are close to a tie."""
    model = layer(size=3, hidden=4, experts=3, k=k)
    x = random(5).standard_normal((6, 3))
    weights = [p.numpy() for p in model.parameters()]
    margins = np.diff(np.sort(x @ weights[0].T, -1), axis=-1)
    assert margins.min() > 1e-3
    dropped = []

    def f(x, router, up, down):
        logits = mt.reshape(x @ router.T, (1, 6, 3))
        routing = moe.route(logits, k, 2 * k - 1)
        dropped.append(not routing.kept.all())
        h = mt.tanh(moe.dispatch(x, routing) @ up)
        return moe.combine(h @ down, routing), moe.balance_loss(logits, routing), moe.z_loss(logits)
    mt.check_grads(f, [x, *weights])
    assert all(dropped)


def test_without_a_capacity_no_row_is_empty():
    """DeepSeek-V3's 8 of 256 would take 32 times the rows by a capacity that drops nothing."""
    x, found = mt.tensor(random(2).standard_normal((6, 7, 5)), requires_grad=True), []
    for factor in (None, 16 / 2):
        model = layer(experts=16, capacity_factor=factor, mlp="swiglu", shared=1)
        with ledger.record(memory=True) as book:
            y, aux = model(x)
            (mt.sum(y * np.arange(5)) + aux).backward()
        found.append([y.numpy(), x.grad.numpy(), *(p.grad.numpy() for p in model.parameters())])
        x.grad = None
        rows = model.routing(x)[1].rows
        assert rows == (84 if factor is None else 42 * 16)
        if factor is None:
            least = book.peak["activation"]
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
    assert book.peak["activation"] - least > (42 * 16 - 84) * (5 + 3 * 7) * 8       # inputs, gate and up, their product


def test_auxiliary_losses():
    x = random(6).standard_normal((3, 8, 5)) * 2
    model = layer(group="sequence", balance=0.5, z=0.25)
    z = x @ model.router.weight.numpy().T
    p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    balance = 0.0
    for g in range(3):
        for e in range(4):
            balance += 4 * (z[g].argmax(-1) == e).mean() * p[g, :, e].mean() / 3
    wanted = 0.5 * balance + 0.25 * (np.log(np.exp(z).sum(-1)) ** 2).mean()
    assert abs(model(x)[1].item() - wanted) < 1e-13


def test_the_balance_is_one_where_all_experts_are_used_alike():
    logits = np.array([[np.roll([2.0, 1.0, -1.0, 0.5], i) for i in range(8)]])
    assert abs(moe.balance_loss(logits, moe.route(logits, 2, 4)) - 1) < 1e-14
    one = np.zeros((1, 8, 4)) + [50.0, 0, 0, 0]
    assert abs(moe.balance_loss(one, moe.route(one, 2, 4)) - 4) < 1e-14


# ---------------------------------------------------------------- in a model

def test_a_gpt_of_experts_learns_and_writes():
    mt.manual_seed(1)
    model = nn.GPT(11, 8, layers=2, heads=2, dim=16, moe={"experts": 4, "z": 0.001, "group": "sequence"})
    tokens = random(7).integers(0, 11, (4, 9))
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        logits, aux = model(tokens[:, :-1])
        loss = (nn.cross_entropy(logits, tokens[:, 1:], reduction="sum") + 32 * aux) / 32
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.2
    assert (model.generate(tokens[:, :4], 5, temperature=0)[:, :8] == tokens[:, :8]).mean() > 0.9
    kept = mt.checkpoint(lambda x: model.blocks[0](x))
    x = mt.tensor(random(8).standard_normal((2, 8, 16)).astype(np.float32), requires_grad=True)
    grads = []
    for run in (model.blocks[0], kept):
        model.zero_grad()
        y, aux = run(x)
        (mt.sum(y * y) + aux).backward()
        grads.append([p.grad.numpy().copy() for p in model.blocks[0].parameters()])
    assert all((a == b).all() for a, b in zip(*grads, strict=True))


def test_compile_says_that_routing_runs_uncompiled():
    model, x = layer(), random(9).standard_normal((6, 5))
    compiled = mt.compile(lambda x: model(x))
    with pytest.warns(UserWarning, match="runs uncompiled: the function asks for the value"):
        y, aux = compiled(x)
    assert (y.numpy() == model(x)[0].numpy()).all() and aux.item() == model(x)[1].item()


@pytest.mark.parametrize("shape", [(0, 6, 5), (0, 5), (2, 0, 5)])
@pytest.mark.parametrize("arguments", [
    {}, {"k": 1, "z": 0.1}, {"group": "sequence"}, {"group": 4}, {"capacity_factor": None},
    {"shared": 1, "score": "sigmoid", "nodes": (2, 1), "expert_bias": True, "sequence_balance": 0.1, "mlp": "swiglu"},
], ids=["usual", "switch", "sequences", "fours", "no capacity", "deepseek"])
def test_of_no_tokens_the_answer_is_empty_and_the_loss_and_all_gradients_are_0(shape, arguments):
    model, x = layer(**arguments), mt.tensor(np.zeros(shape), requires_grad=True)
    y, aux = model(x)
    assert y.shape == shape and aux.item() == 0
    (mt.sum(y) + aux).backward()
    assert x.grad.shape == shape and all((p.grad.numpy() == 0).all() for p in model.parameters())


def test_errors_say_what_to_do():
    with pytest.raises(ValueError, match="k=3 of 2 experts"):
        layer(experts=2, k=3)
    with pytest.raises(ValueError, match="k=0 of 4 experts"):
        moe.route(np.zeros((1, 3, 4)), 0, 2)
    for factor in (0, np.inf, "none"):
        with pytest.raises(ValueError, match=f"capacity_factor={factor!r} must be a number above 0, or None"):
            layer(capacity_factor=factor)
    with pytest.raises(ValueError, match="group='row'"):
        layer(group="row")
    with pytest.raises(ValueError, match=r"12 tokens of an input \[2, 6, 5\] can't be routed in groups of 5"):
        layer(group=5)(np.zeros((2, 6, 5)))
