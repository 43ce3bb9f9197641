"""The delta rule against its recurrence in plain NumPy, one position after the other. What its
layer has in common with linear attention: test_linear_attention.py; what it is good for: test_recall_example.py."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import nn
from minitorch_dist.nn import states
from minitorch_dist.nn.delta_rule import before, delta_rule, inverse, part_of, read_on

from .test_linear_attention import come_again, drawn, numbers
from .test_transformer import linear, norm

random = np.random.default_rng


def recurrence(q, k, v, logs, rates, documents=None, state=None):
    """(y, the state at the end): S = a (I - b k kᵀ) S + b k vᵀ, y = Sᵀ q."""
    batch, heads, time, size = q.shape
    state = np.zeros((batch, heads, size, v.shape[3])) if state is None else state.copy()
    y = np.empty(v.shape)
    for i, h in np.ndindex(batch, heads):
        for t in range(time):
            if documents is not None and t and documents[i, t] != documents[i, t - 1]:
                state[i, h] = 0
            key, b = k[i, h, t], rates[i, h, t]
            state[i, h] = np.exp(logs[i, h, t]) * (np.eye(size) - b * np.outer(key, key)) @ state[i, h] \
                + b * np.outer(key, v[i, h, t])
            y[i, h, t] = state[i, h].T @ q[i, h, t]
    return y, state


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def arguments(time, size=3, batch=2, heads=3, seed=0):
    """q, k, v, logs, rates; some logs forget nearly all."""
    rng = random(seed)
    q, k = rng.standard_normal((2, batch, heads, time, size))
    return (q, unit(k), rng.standard_normal((batch, heads, time, 2)), -rng.exponential(1, (batch, heads, time)) ** 2,
            1 / (1 + np.exp(-2 * rng.standard_normal((batch, heads, time)))))


@pytest.mark.parametrize("documents", [None, numbers, come_again], ids=["one", "several", "by turns"])
@pytest.mark.parametrize("time", [0, 1, 2, 4, 7, 12, 13, 50])
def test_in_stretches_it_is_the_recurrence(stretch, time, documents):
    given = arguments(time)
    rows = None if documents is None else documents(time)
    y = delta_rule(*map(mt.tensor, given), rows)
    np.testing.assert_allclose(y.numpy(), recurrence(*given, rows)[0], rtol=0, atol=1e-12)


def test_in_pieces_it_is_the_whole(stretch):
    """Also a piece of no positions."""
    given, state, found = arguments(13), None, []
    for piece in ((0, 5), (5, 5), (5, 6), (6, 13)):
        y, state = read_on(*(x[:, :, slice(*piece)] for x in given), state)
        found.append(y)
    wanted = recurrence(*given)
    np.testing.assert_allclose(np.concatenate(found, 2), wanted[0], rtol=0, atol=1e-12)
    np.testing.assert_allclose(state, wanted[1], rtol=0, atol=1e-12)


def test_parts_are_linear_in_what_stands_before_them(stretch):
    """Of documents too: nothing is left of a state where one begins."""
    start, given = random(1).standard_normal((2, 3, 3, 2)), arguments(13)
    for rows in (None, numbers(14), np.zeros((2, 14), int)):
        part = part_of(*given, rows)
        own = None if rows is None else rows[:, 1:]
        begins = start if rows is None else start * (rows[:, :1] == rows[:, 1:2])[..., None, None]
        y, state = recurrence(*given, own, begins)
        np.testing.assert_allclose(part.y + part.reads @ start, y, rtol=0, atol=1e-12)
        np.testing.assert_allclose(part.state + part.kept @ start, state, rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_parts_are_put_together_in_their_order(n):
    parts = [part_of(*arguments(3, seed=seed)) for seed in range(n)]
    found = before(np.stack([part.state for part in parts], 2), np.stack([part.kept for part in parts], 2))
    state = np.zeros((2, 3, 3, 2))
    for seed in range(n):
        np.testing.assert_allclose(found[:, :, seed], state, rtol=0, atol=1e-12)
        state = recurrence(*arguments(3, seed=seed), state=state)[1]


def test_gradients_in_every_mode():
    """Reverse, forward, second order, of a beginning as well."""
    state = random(3).standard_normal((1, 2, 2, 2))
    mt.check_grads(lambda *given: mt.concatenate([mt.reshape(part, (-1,)) for part in read_on(*given)], 0),
                   [*arguments(5, 2, 1, 2), state])


@pytest.mark.parametrize("documents", [None, numbers], ids=["one", "several"])
def test_gradients_in_stretches(stretch, documents):
    """Those of one stretch, which are compared with finite differences."""
    rows, found = None if documents is None else documents(11), []
    for shortest in (states.SHORTEST, 64):
        states.SHORTEST = shortest
        given = [mt.tensor(x, requires_grad=True) for x in arguments(11)]
        parts = [delta_rule(*given, rows)] if rows is not None else read_on(*given)
        sum((part * random(5).standard_normal(part.shape)).sum() for part in parts).backward()
        found.append([x.grad.numpy() for x in given])
    for one, other in zip(*found, strict=True):
        assert abs(one).max() > 0.1
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-11)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 16, 24, 33])
def test_the_inverse(size):
    n = np.tril(random(size).standard_normal((2, 3, size, size)) / size ** 0.5, -1)
    np.testing.assert_allclose(inverse(n) @ (np.eye(size) + n), np.broadcast_to(np.eye(size), n.shape), rtol=0,
                               atol=1e-11)
    mt.check_grads(lambda x: inverse(mt.where(np.tri(size, k=-1, dtype=bool), x, 0.0)),
                   [random(1).standard_normal((1, size, size)) / 4], order=1) if size < 8 else None


def test_keys_that_come_again_take_no_digits():
    """In float32, all keys of a stretch of 64 alike, replaced as a whole, nothing forgotten: the state is the last
    value. The inverse as a product of I + (-n)^(2^i), whose entries cancel, would be off by 1e9 and more."""
    q, k, v, logs, rates = (x.astype(np.float32) for x in arguments(192, 64, 1, 1))
    k, logs, rates = k[:, :, :1] + np.zeros_like(k), np.zeros_like(logs), np.ones_like(rates)
    given = q, k, v, logs, rates
    found = delta_rule(*given)
    wanted = recurrence(*(x.astype(np.float64) for x in given))[0]
    np.testing.assert_allclose(wanted, (q @ k.swapaxes(2, 3))[..., :1] * v, rtol=0, atol=1e-5)
    assert np.linalg.norm(found - wanted) < 1e-5 * np.linalg.norm(wanted)
    n = np.tril(np.ones((64, 64), np.float32), -1)
    product, power = np.eye(64, dtype=np.float32), -n
    for _ in range(6):
        product, power = product + product @ power, power @ power
    assert abs(product - inverse(n[None])[0]).max() > 1e9


def test_what_is_forgotten_takes_no_digits_with_it():
    """In float32, behind positions that forget e⁻³⁰⁰⁰ each."""
    q, k, v, logs, rates = (x.astype(np.float32) for x in arguments(40))
    logs[:, :, :20], logs[:, :, 20:] = -3000, -0.01
    given = [mt.tensor(x, requires_grad=True) for x in (q, k, v, logs, rates)]
    found = delta_rule(*given)
    wanted, _ = recurrence(*(x.astype(np.float64) for x in (q, k, v, logs, rates)))
    assert np.linalg.norm(found.numpy() - wanted) < 1e-6 * np.linalg.norm(wanted)
    found.sum().backward()
    assert all(np.isfinite(x.grad.numpy()).all() for x in given)


def test_under_autocast_rounding_does_not_add_up():
    """Over 128 positions that replace most of what nearly equal keys have, of which bfloat16 has 8 bits: a per cent."""
    q, k, v, logs, rates = arguments(128, 16, 1, 2)
    k, rates = unit(k + 2 * k[:, :, :1]), rates ** 0.2
    given = [x.astype(np.float32) for x in (q, k, v, logs * 0.01, rates)]
    wanted = recurrence(*(x.astype(np.float64) for x in given))[0]
    with mt.autocast("bfloat16"):
        found = delta_rule(*map(mt.tensor, given)).numpy()
    assert 1e-3 < np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < 0.02


def attend(x, w, heads, qk_norm=False):
    """x (time, dim) through a DeltaAttention of parameters w."""
    time, dim = x.shape
    size, h, out = dim // heads, linear(x, w, "project"), np.empty(x.shape)
    for head in range(heads):
        here = slice(head * size, (head + 1) * size)
        q, k, v, gate = (h[:, i * dim:(i + 1) * dim][:, here] for i in range(4))
        if qk_norm:
            q, k = norm(q, w["q_norm.weight"]), norm(k, w["k_norm.weight"])
        kept = 1 / (1 + np.exp(-h[:, 4 * dim + head] - w["decay.bias"][head]))
        rates = 1 / (1 + np.exp(-h[:, 4 * dim + heads + head]))
        y, _ = recurrence(*(part[None, None] for part in (q / np.sqrt(size), unit(k), v, np.log(kept), rates)))
        out[:, here] = norm(y[0, 0], w["norm.weight"]) * gate / (1 + np.exp(-gate))
    return linear(out, w, "out")


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_the_layer(stretch, bias, qk_norm):
    # A key's length has 1e-6 added to the mean of its squares.
    layer, x, _, weights = drawn(nn.DeltaAttention, attend, bias, qk_norm, {"rtol": 1e-5, "atol": 1e-5})
    v = layer.project(mt.tensor(x)).numpy()[..., 30:45]
    found = weights @ v.reshape(2, 7, 3, 5).transpose(0, 2, 1, 3)
    y = norm(found, layer.norm.weight.numpy()).transpose(0, 2, 1, 3).reshape(2, 7, 15)
    gate = layer.project(mt.tensor(x)).numpy()[..., 45:60]
    np.testing.assert_allclose(layer.out(mt.tensor(y * gate / (1 + np.exp(-gate)))).numpy(),
                               layer(mt.tensor(x)).numpy(), rtol=1e-10, atol=1e-11)


def test_a_key_of_zeros_is_no_nan():
    layer = nn.DeltaAttention(8, 2, bias=False)
    x = mt.tensor(np.zeros((1, 5, 8), np.float32), requires_grad=True)
    layer(x).sum().backward()
    assert np.isfinite(x.grad.numpy()).all()


def test_it_forgets_the_one_value_that_is_replaced():
    """Four keys, of which one is given a new value: the others keep theirs, which no decay of all at once can do, and
    sums of the old and the new are what linear attention has."""
    keys, first, new = np.eye(4), random(0).standard_normal((4, 3)), random(1).standard_normal(3)
    k, v = np.concatenate([keys, keys[1:2]]), np.concatenate([first, new[None]])
    logs, rates = np.zeros((1, 1, 5)), np.ones((1, 1, 5))
    state = read_on(*(x[None, None] for x in (k, k, v)), logs, rates)[1][0, 0]
    np.testing.assert_allclose(state, [first[0], new, first[2], first[3]], rtol=0, atol=1e-14)
    added = states.read_on(*(x[None, None] for x in (k, k, v)), logs)[1][0, 0]
    np.testing.assert_allclose(added[1], first[1] + new, rtol=0, atol=1e-14)
