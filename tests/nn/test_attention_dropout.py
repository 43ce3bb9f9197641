"""Dropout of attention's weights: who is dropped, by which numbers, in which modes, and what is refused."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import backend, nn
from minitorch_dist.nn.decoding import KeyValueCache
from minitorch_dist.parallel.context import context_parallel

random = np.random.default_rng
P = 0.4


def by_hand(q, k, v, keep, ct, p, causal):
    """(y, dq, dk, dv), position by position; keep (batch, heads, time, sources): which weights stay."""
    y, dq, dk, dv = np.zeros_like(ct), *(np.zeros_like(x) for x in (q, k, v))
    group, scale = q.shape[1] // k.shape[1], q.shape[3] ** -0.5
    for b, h, t in np.ndindex(q.shape[:3]):
        g, s = h // group, slice(t + 1 if causal else k.shape[2])
        e = np.exp(k[b, g, s] @ q[b, h, t] * scale)
        weights, factor = e / e.sum(), keep[b, h, t, s] / (1 - p)
        y[b, h, t] = weights * factor @ v[b, g, s]
        score = weights * (factor * (v[b, g, s] @ ct[b, h, t]) - ct[b, h, t] @ y[b, h, t]) * scale
        dq[b, h, t] = score @ k[b, g, s]
        dk[b, g, s] += score[:, None] * q[b, h, t]
        dv[b, g, s] += (weights * factor)[:, None] * ct[b, h, t]
    return y, dq, dk, dv


def draws(shapes=((3, 4, 5, 2), (3, 2, 5, 2), (3, 2, 5, 3), (3, 4, 5, 3))):
    return [random(i).standard_normal(shape) for i, shape in enumerate(shapes)]


def scope(rows=(0, 3), step=2):
    return backend.random_scope(1, step, 3, rows, micro_shards=4)


@pytest.mark.parametrize("causal", [False, True])
def test_weights_are_dropped_by_the_numbers_of_their_samples(causal):
    """Values and gradients, by the numbers that backend.random_rows draws; for some of the samples, those of theirs."""
    q, k, v, ct = draws()
    for rows in ((0, 3), (1, 3), (2, 3)):
        here = slice(*rows)
        with scope(rows):
            keep = backend.random_rows((rows[1] - rows[0], 4, 5, 5)) >= P
        with scope():
            np.testing.assert_array_equal(keep, (backend.random_rows((3, 4, 5, 5)) >= P)[here])
        wanted = by_hand(q[here], k[here], v[here], keep, ct[here], P, causal)
        leaves = [mt.tensor(x[here], requires_grad=True) for x in (q, k, v)]
        with scope(rows):
            y = mt.scaled_dot_product_attention(*leaves, dropout_p=P, is_causal=causal)
        y.backward(mt.tensor(ct[here]))
        for got, true in zip((y, *(leaf.grad for leaf in leaves)), wanted, strict=True):
            np.testing.assert_allclose(got.numpy(), true, rtol=1e-10, atol=1e-12)


def test_what_drops_weights_may_be_given():
    """A function of them; beside a mask, of which some rows see nothing."""
    q, k, v, ct = draws()
    keep = random(9).random((3, 4, 5, 5)) >= P
    sees = random(8).random((5, 5)) < 0.3

    def dropped(p):
        return mt.dropout(p, P, mask=keep)
    y, pull = mt.vjp(lambda *x: mt.scaled_dot_product_attention(*x, None, dropped, True), q, k, v)
    for got, true in zip((y, *pull(ct)), by_hand(q, k, v, keep, ct, P, True), strict=True):
        np.testing.assert_allclose(got, true, rtol=1e-10, atol=1e-12)
    y = mt.scaled_dot_product_attention(q, k, v, sees, dropped)
    assert not sees.any(1).all() and not y[:, :, ~sees.any(1)].any() and np.isfinite(y).all()
    mt.check_grads(lambda *x: mt.scaled_dot_product_attention(*x, sees, dropped), (q, k, v))


def test_so_many_are_dropped_and_the_mean_stays():
    x = np.zeros((8, 2, 40, 4))
    ones = np.ones((8, 2, 40, 1))
    with scope():
        y = mt.scaled_dot_product_attention(x, x, ones, dropout_p=P)
    # Each is the mean of 40 numbers, 0 or 1/(1 - P).
    assert abs(y.mean() - 1) < 5 * (P / (1 - P) / y.size / 40) ** 0.5
    assert 0.8 < y.std() / (P / (1 - P) / 40) ** 0.5 < 1.2
    np.testing.assert_array_equal(mt.scaled_dot_product_attention(x, x, ones, dropout_p=1.0), np.zeros_like(ones))
    before = backend.random_state.draws
    np.testing.assert_allclose(mt.scaled_dot_product_attention(x, x, ones, dropout_p=0), ones, rtol=1e-15)
    assert backend.random_state.draws == before


def gpt(**options):
    mt.manual_seed(3)
    return nn.GPT(11, 6, 2, 4, 8, **{"attention_dropout": P, "dtype": np.float64} | options)


TOKENS = random(4).integers(0, 11, (3, 6))
KINDS = {"gpt": {}, "grouped, windows, norms": {"kv_heads": 2, "window": (2, None), "qk_norm": True, "dropout": 0.1},
         "latents": {"latent": {}, "positions": "rotary"}}


def gradients(model, run=None):
    model.zero_grad()
    with scope():
        loss = nn.cross_entropy((run or model)(TOKENS), TOKENS)
    loss.backward()
    return loss.item(), {name: p.grad.numpy().copy() for name, p in model.named_parameters()}


def same(found, wanted, atol=0.0):
    np.testing.assert_allclose(found[0], wanted[0], rtol=0, atol=atol)
    for name, g in wanted[1].items():
        np.testing.assert_allclose(found[1][name], g, rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_run_again_it_drops_the_same(kind):
    """A second backward and a checkpoint's second run, to the bit; a compiled step; and along a direction the gradient
    is the difference."""
    model = gpt(**KINDS[kind])
    wanted = gradients(model)
    with scope():
        loss = nn.cross_entropy(model(TOKENS), TOKENS)
    for _ in range(2):
        model.zero_grad()
        loss.backward(retain_graph=True)
        same((loss.item(), {name: p.grad.numpy() for name, p in model.named_parameters()}), wanted)
    with scope(step=3):
        assert abs(nn.cross_entropy(model(TOKENS), TOKENS).item() - wanted[0]) > 1e-4
    compiled = mt.compile(model)
    for _ in range(2):
        same(gradients(model, compiled), wanted, 1e-12)
    assert not compiled.breaks, compiled.breaks
    ways = {name: random(len(name)).standard_normal(p.shape) for name, p in model.named_parameters()}
    slope, losses = sum((g * ways[name]).sum() for name, g in wanted[1].items()), []
    for h in (1e-6, -1e-6):
        moved = gpt(**KINDS[kind])
        for name, p in moved.named_parameters():
            p.data[...] += h * ways[name]
        losses.append(gradients(moved)[0])
    np.testing.assert_allclose((losses[0] - losses[1]) / 2e-6, slope, rtol=1e-5)
    for block in model.blocks:
        block.forward = mt.checkpoint(type(block).forward.__get__(block))
    same(gradients(model), wanted)


def test_second_derivatives_and_forward_mode_drop_the_same():
    """Each of them runs the function once, in a scope of its own: as of a mask that is given."""
    q, k, v, _ = draws()
    with scope():
        keep = backend.random_rows((3, 4, 5, 5)) >= P

    def drawn(q):
        with scope():
            return mt.sum(mt.sin(mt.scaled_dot_product_attention(q, k, v, dropout_p=P)))

    def given(q):
        return mt.sum(mt.sin(mt.scaled_dot_product_attention(q, k, v, dropout_p=lambda p: mt.dropout(p, P, mask=keep))))
    way = random(7).standard_normal(q.shape)
    for transform in (lambda f: mt.grad(f)(q), lambda f: mt.jvp(f, (q,), (way,))[1],
                      lambda f: mt.hvp(f, q, way), lambda f: mt.linearize(f, q)[1](way)):
        np.testing.assert_allclose(transform(drawn), transform(given), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_drops_nothing(kind):
    """By the same way as without: a kernel's, a cache's."""
    model, plain = gpt(**KINDS[kind]).eval(), gpt(**KINDS[kind] | {"attention_dropout": 0.0}).eval()
    assert list(dict(model.named_parameters())) == list(dict(plain.named_parameters()))
    np.testing.assert_array_equal(model(TOKENS).numpy(), plain(TOKENS).numpy())
    np.testing.assert_array_equal(model.generate(TOKENS[:, :2], 3, 0), plain.generate(TOKENS[:, :2], 3, 0))
    x = random(0).standard_normal((2, 5, 8))
    model.train()
    np.testing.assert_array_equal(model.blocks[0].attention.weights(mt.tensor(x)),
                                  plain.blocks[0].attention.weights(mt.tensor(x)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_autocast(dtype):
    model = gpt(dtype=np.float32)
    exact = gradients(model)
    with mt.autocast(dtype):
        low = gradients(model)
    norm = sum((g ** 2).sum() for g in exact[1].values()) ** 0.5
    apart = sum(((low[1][name] - g) ** 2).sum() for name, g in exact[1].items()) ** 0.5
    assert 0 < apart < 16 * float(backend.finfo(backend.as_dtype(dtype)).eps) * norm


def read(model):
    KeyValueCache(model).read(TOKENS)


def attend(**options):
    x = np.ones((1, 1, 2, 3))
    mt.scaled_dot_product_attention(x, x, x, **options)


@pytest.mark.parametrize("error, call, words", [
    (ValueError, lambda: gpt(window=("linear", None)), "attention_dropout=0.4 with window='linear': Linear"),
    (ValueError, lambda: gpt(attention_dropout=1.0), "Dropout: p is 1.0"),
    (ValueError, lambda: attend(dropout_p=-0.1), "dropout: p is -0.1"),
    (TypeError, lambda: attend(attn_mask=None, dropout_p=True), "dropout_p=True; it is a probability, and stands"),
    (ValueError, lambda: read(gpt()), "MultiHeadAttention: dropout 0.4 of weights, of which a part is here .a cach"),
    (ValueError, lambda: read(gpt(**KINDS["latents"])), "LatentAttention: dropout 0.4 of weights"),
    (ValueError, lambda: context_parallel(gpt(), mt.comm.world()),
     "blocks.0.attention drops weights with probability 0.4, and a ring has none .* take how='all_to_all'"),
    (ValueError, lambda: context_parallel(gpt(attention_dropout=0.0, sinks=True), mt.comm.world()),
     "blocks.0.attention has sinks, which a ring would count once per rank: take how='all_to_all'"),
])
def test_what_does_not_fit_is_refused(error, call, words):
    with pytest.raises(error, match=words):
        call()
