"""Attention with a mask, of bools or of floats that are added: who sees whom, values and gradients position by
position, and what is refused."""

import functools

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import backend

random = np.random.default_rng


def by_hand(q, k, v, bias, ct, causal=False, window=None, documents=None, sinks=None):
    """(y, dq, dk, dv, dbias, dsinks), position by position; bias (batch, heads, time, sources), -inf where nobody may
    look."""
    y, dq, dk, dv, dbias = np.zeros_like(ct), *(np.zeros_like(x) for x in (q, k, v, bias))
    dsinks = np.zeros(q.shape[1])
    group, scale = q.shape[1] // k.shape[1], q.shape[3] ** -0.5
    for b, h, t in np.ndindex(q.shape[:3]):
        s = [s for s in range(k.shape[2]) if bias[b, h, t, s] > -np.inf and not (causal and s > t)
             and (window is None or abs(t - s) < window)
             and (documents is None or documents[b, t] == documents[b, s])]
        if not s:
            continue
        g = h // group
        e = np.exp(k[b, g, s] @ q[b, h, t] * scale + bias[b, h, t, s])
        lost = 0 if sinks is None else np.exp(sinks[h])
        p = e / (e.sum() + lost)
        y[b, h, t] = p @ v[b, g, s]
        score = p * (v[b, g, s] @ ct[b, h, t] - ct[b, h, t] @ y[b, h, t])
        dbias[b, h, t, s] = score
        dsinks[h] -= lost / (e.sum() + lost) * (ct[b, h, t] @ y[b, h, t])
        dq[b, h, t] = score @ k[b, g, s] * scale
        dk[b, g, s] += score[:, None] * q[b, h, t] * scale
        dv[b, g, s] += p[:, None] * ct[b, h, t]
    return y, dq, dk, dv, dbias, dsinks


def summed(g, shape):
    """A gradient of what was broadcast."""
    lead = g.ndim - len(shape)
    g = g.sum(tuple(range(lead)))
    return g.sum(tuple(i for i, n in enumerate(shape) if n == 1), keepdims=True)


SHAPES = [(2, 4, 7, 7), (2, 1, 1, 7), (4, 1, 7), (7, 7), (1, 7), (7,), ()]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rules", [{}, {"causal": True}, {"window": 3}, {"causal": True, "window": 2},
                                   {"documents": np.array([[0, 0, 1, 1, 1, 2, 2], [3, 3, 3, 1, 1, 1, 1]])}],
                         ids=lambda rules: " ".join(rules) or "alone")
def test_floats_are_added_to_the_scores(shape, rules):
    """Values and all gradients; about a third of the bias is -inf, so that some rows see nothing."""
    draw = random(len(shape)).standard_normal
    q, k, v, ct = draw((2, 4, 7, 3)), draw((2, 2, 7, 3)), draw((2, 2, 7, 5)), draw((2, 4, 7, 5))
    bias = np.asarray(2 * draw(shape))
    bias[bias < -1] = -np.inf
    whole = np.broadcast_to(bias, (2, 4, 7, 7)).copy()
    options = {{"causal": "is_causal"}.get(name, name): value for name, value in rules.items()}
    y, pull = mt.vjp(lambda *x: mt.scaled_dot_product_attention(*x, **options), q, k, v, bias)
    *wanted, dbias, _ = by_hand(q, k, v, whole, ct, **rules)
    for got, true in zip((y, *pull(ct)), (*wanted, summed(dbias, shape)), strict=True):
        np.testing.assert_allclose(got, true, rtol=1e-10, atol=1e-12)
    leaves = [mt.tensor(x, requires_grad=True) for x in (q, k, v, bias)]
    mt.scaled_dot_product_attention(*leaves, **options).backward(mt.tensor(ct))
    np.testing.assert_allclose(leaves[3].grad.numpy(), summed(dbias, shape), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bools_are_floats_of_0_and_minus_inf(shape):
    draw = random(5)
    q, k, v = draw.standard_normal((2, 4, 7, 3)), draw.standard_normal((2, 2, 7, 3)), draw.standard_normal((2, 2, 7, 5))
    sees = draw.random(shape) < 0.5
    ct = draw.standard_normal((2, 4, 7, 5))
    for causal in (False, True):
        def attention(*x, mask, causal=causal):
            return mt.scaled_dot_product_attention(*x, mask, is_causal=causal)
        found = []
        for mask in (sees, np.where(sees, 0.0, -np.inf)):
            y, pull = mt.vjp(lambda *x, mask=mask: attention(*x, mask=mask), q, k, v)
            found.append((y, *pull(ct)))
        for a, b in zip(*found, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


def test_small_cases_by_hand():
    """Two sources, of values 10 and 20, and equal scores: a bias of log 3 on the first makes weights 3/4 and 1/4."""
    q, k, v = np.zeros((1, 1, 2, 1)), np.zeros((1, 1, 2, 1)), np.array([10.0, 20]).reshape(1, 1, 2, 1)

    def found(mask, **options):
        return mt.scaled_dot_product_attention(q, k, v, np.array(mask), **options)[0, 0, :, 0].tolist()
    log3, inf = np.log(3), np.inf
    np.testing.assert_allclose(found([[log3, 0], [0, log3]]), [12.5, 17.5])
    np.testing.assert_allclose(found([log3, 0]), [12.5, 12.5])
    assert found([[True, False], [False, True]]) == found([[0, -inf], [-inf, 0]]) == [10, 20]     # True takes part
    assert found([[False, False], [True, True]]) == found([[-inf, -inf], [0, 0]]) == [0, 15]      # sees nothing: 0
    assert found([False, True], is_causal=True) == found([-inf, 0], is_causal=True) == [0, 20]
    assert found([0, -inf], window=1) == [10, 0]
    assert found([0, -inf], documents=np.array([[0, 1]])) == [10, 0]
    by_lists = mt.scaled_dot_product_attention(q, k, v, [[True, True], [True, False]], documents=[[0, 1]])
    assert by_lists[0, 0, :, 0].tolist() == [10, 0]
    assert found([[-1e30, -1e30], [0, 0]]) == [15, 15]      # a large number forbids nothing: all alike


@pytest.mark.parametrize("options", [{}, {"is_causal": True, "window": 2}, {"attn_mask": np.log([[1, 2, 3, 4]] * 3)},
                                     {"sinks": np.array([0.5, -0.5])}], ids=["plain", "band", "bias", "sinks"])
def test_a_scale_may_be_learned(options):
    """One number, or one per head: attention of scaled queries, and of one number that of the number itself."""
    draw = random(4).standard_normal
    sources = 3 if "is_causal" in options else 4
    q, k = draw((1, 2, 3, 2)), draw((1, 1, sources, 2))
    for scale in (np.array(0.7), np.array([0.7, 1.3]).reshape(2, 1, 1)):
        found = mt.scaled_dot_product_attention(q, k, k, scale=mt.tensor(scale), **options)
        wanted = mt.scaled_dot_product_attention(q * scale, k, k, scale=1.0, **options)
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-13)
        mt.check_grads(lambda q, k, s: mt.scaled_dot_product_attention(q, k, k, scale=s, **options), (q, k, scale))
    half = mt.scaled_dot_product_attention(*(mt.tensor(x, dtype="float16") for x in (q, k, k)), scale=mt.tensor(0.7),
                                           **options)
    assert half.dtype == np.float16


def test_derivatives_of_the_bias():
    """To second order, and in forward mode; a bias that every head has of its own distance, as ALiBi's."""
    draw = random(2).standard_normal
    q, k, slopes = draw((1, 2, 3, 2)), draw((1, 1, 4, 2)), draw((2, 1, 1))
    distance = np.abs(np.arange(3)[:, None] - np.arange(4))
    mt.check_grads(lambda q, k, slopes: mt.scaled_dot_product_attention(q, k, k, slopes * -distance, is_causal=True),
                   (q, k, slopes))


@pytest.mark.parametrize("rules", [{}, {"causal": True, "window": 3}], ids=str)
def test_sinks_take_a_part_of_all_weights(rules):
    """Values and all gradients, with a bias of which rows are -inf: of nothing seen, 0 stays."""
    draw = random(1).standard_normal
    q, k, v, ct = draw((2, 4, 7, 3)), draw((2, 2, 7, 3)), draw((2, 2, 7, 5)), draw((2, 4, 7, 5))
    bias, sinks = np.where(random(2).random((2, 4, 7, 7)) < 0.3, -np.inf, draw((2, 4, 7, 7))), draw(4)
    bias[:, :, 3] = -np.inf
    options = {{"causal": "is_causal"}.get(name, name): value for name, value in rules.items()}
    y, pull = mt.vjp(lambda *x: mt.scaled_dot_product_attention(*x[:4], **options, sinks=x[4]), q, k, v, bias, sinks)
    for got, true in zip((y, *pull(ct)), by_hand(q, k, v, bias, ct, **rules, sinks=sinks), strict=True):
        np.testing.assert_allclose(got, true, rtol=1e-10, atol=1e-12)
    assert not y[:, :, 3].any()


def test_of_a_sink_as_high_as_one_score_half_is_left():
    """One source is seen, and the sink has its score: a weight of 1/2; of a sink of -inf, all."""
    x = np.array([[[[2.0]]]])
    assert mt.scaled_dot_product_attention(x, x, x, scale=1, sinks=np.array([4.0])).item() == 1
    assert mt.scaled_dot_product_attention(x, x, x, scale=1, sinks=np.array([-np.inf])).item() == 2
    q, k, sinks = random(2).standard_normal((1, 2, 3, 2)), random(3).standard_normal((1, 1, 3, 2)), np.array([0.3, -1])
    mt.check_grads(lambda q, k, s: mt.scaled_dot_product_attention(q, k, k, is_causal=True, sinks=s), (q, k, sinks))
    with pytest.raises(ValueError, match=r"attention: sinks \(3,\) of 2 heads: one score for each"):
        mt.scaled_dot_product_attention(q, k, k, sinks=np.zeros(3))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtypes(dtype):
    """A bias of another dtype becomes the query's, and its gradient comes back in its own."""
    draw = random(3).standard_normal
    dtype = backend.as_dtype(dtype)
    q = mt.tensor(draw((1, 2, 3, 4)).astype(dtype), requires_grad=True)
    bias = mt.tensor(draw((3, 3)), requires_grad=True)
    y = mt.scaled_dot_product_attention(q, q, q, bias)
    y.sum().backward()
    assert y.dtype == q.grad.dtype == dtype and bias.grad.dtype == np.float64
    whole = q.numpy().astype(np.float64)
    exact = mt.scaled_dot_product_attention(whole, whole, whole, bias.numpy())
    np.testing.assert_allclose(y.numpy().astype(np.float64), exact,
                               atol=4 * float(backend.finfo(dtype).eps) * np.abs(whole).max())


@pytest.mark.parametrize("options", [
    {}, {"sinks": np.zeros(1)}, {"attn_mask": np.zeros((2, 4))}, {"dropout_p": lambda p: p * 1.0},
    {"sinks": np.zeros(1), "window": 4}], ids=["plain", "sinks", "bias", "dropout", "window"])
@pytest.mark.parametrize("cast", [False, True], ids=["pure", "autocast"])
def test_products_that_only_their_scale_brings_into_float16s_range(options, cast):
    """Scores of 12,800, made of products of 102,400: two sources that are alike get 1/2 each, and their gradients."""
    kind = np.float32 if cast else np.float16
    k, v = np.full((1, 1, 4, 64), 40, kind), np.arange(4, dtype=kind).reshape(1, 1, 4, 1)
    k[:, :, 2:] = 20

    def attend(q, k, v):
        with mt.autocast("float16", enabled=cast):
            return mt.scaled_dot_product_attention(q, k, v, **options)
    y, pull = mt.vjp(attend, k[:, :, :2], k, v)
    of_q, of_k, of_v = pull(np.ones_like(y))
    assert y.ravel().tolist() == [0.5, 0.5] and of_v.ravel().tolist() == [1, 1, 0, 0] and not of_q.any()
    np.testing.assert_array_equal(of_k[0, 0], np.repeat([[-2.5], [2.5], [0], [0]], 64, 1))      # 2 · ±1/4 · 40/8
    assert mt.jvp(attend, (k[:, :, :2], k, v), (k[:, :, :2] * 0, k * 0, v))[1].ravel().tolist() == [0.5, 0.5]


@pytest.mark.parametrize("attend", [
    mt.scaled_dot_product_attention, functools.partial(mt.scaled_dot_product_attention, is_causal=True),
    functools.partial(mt.scaled_dot_product_attention, window=40), lambda q, k, v: mt.block_attention(q, k, v, 16, 3)],
    ids=["all", "causal", "narrow band", "blocks"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_values_that_have_much_in_common_give_gradients_to_16_bits(attend, dtype):
    """Weights that are kept in 16 bits add up to 1 but for their rounding, which would be multiplied by what all values
    have in common: 40 here, beside differences of 1."""
    draw, ends = random(6).standard_normal, []
    given = [(draw((1, 2, 256, 8)) + more).astype(backend.as_dtype(dtype)) for more in (0, 0, 40)]
    for kind in (backend.as_dtype(dtype), np.float64):
        leaves = [mt.tensor(x.astype(kind), requires_grad=True) for x in given]
        y = attend(*leaves)
        y.backward(mt.tensor(np.ones(y.shape, kind)))
        ends.append([leaf.grad.numpy().astype(np.float64) for leaf in leaves])
    for a, b in zip(*ends, strict=True):
        assert np.linalg.norm(a - b) < float(backend.finfo(backend.as_dtype(dtype)).eps) * np.linalg.norm(b)


@pytest.mark.parametrize("options", [{"sinks": np.array([1.0, -1.0])}, {"attn_mask": np.log([[1, 2, 3, 4]] * 3)},
                                     {"dropout_p": lambda p: p * 1.0}], ids=["sinks", "bias", "dropout"])
@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_chain_of_16_bits_is_computed_in_float32(options, dtype, compiled):
    """Cotangents of weights are 100 · 1,000, beyond float16's range, and scores up to 50, which 11 bits would round to
    1/32, and weights to a thirtieth: values and gradients are float64's all the same."""
    attend = functools.partial(mt.scaled_dot_product_attention, **options)
    attend = mt.compile(attend) if compiled else attend
    draw, ends = random(5).standard_normal, []
    given = [(draw(shape) * size).astype(backend.as_dtype(dtype)) for shape, size in (
        ((1, 2, 3, 8), 8), ((1, 2, 4, 8), 2), ((1, 2, 4, 2), 1000))]
    for kind in (backend.as_dtype(dtype), np.float64):
        leaves = [mt.tensor(x.astype(kind), requires_grad=True) for x in given]
        y = attend(*leaves)
        y.backward(mt.tensor(np.full(y.shape, 100, kind)))
        ends.append([y.dtype, *(x.numpy().astype(np.float64) for x in (y, *(leaf.grad for leaf in leaves)))])
    (kind, *found), (_, *exact) = ends
    assert kind == backend.as_dtype(dtype)
    for a, b in zip(found, exact, strict=True):
        assert np.linalg.norm(a - b) < float(backend.finfo(kind).eps) * np.linalg.norm(b)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_autocast(dtype):
    """Products in 16 bits, the bias and softmax in float32."""
    draw = random(3).standard_normal
    q, bias = mt.tensor(draw((1, 2, 5, 4)).astype("float32"), requires_grad=True), 9 * draw((5, 5)).astype("float32")
    bias = mt.tensor(bias, requires_grad=True)
    with mt.autocast(dtype):
        y = mt.scaled_dot_product_attention(q, q, q, bias)
    assert y.dtype == backend.as_dtype(dtype)
    (y.astype("float32") * q).sum().backward()
    exact, leaf = (mt.tensor(x.numpy(), requires_grad=True) for x in (q, bias))
    (mt.scaled_dot_product_attention(exact, exact, exact, leaf) * exact).sum().backward()
    assert q.grad.dtype == bias.grad.dtype == np.float32
    for a, b in ((q, exact), (bias, leaf)):
        assert np.abs(a.grad.numpy() - b.grad.numpy()).max() < 6 * float(backend.finfo(y.dtype).eps) * np.abs(
            b.grad.numpy()).max()


@pytest.mark.parametrize("shape, mask", [((1, 1, 2, 3), (2, 2, 3)), ((1, 2, 2, 3), (3, 2, 3)), ((2, 1, 1, 3), (4, 3))],
                         ids=str)
def test_a_mask_that_would_make_more_of_the_scores_is_refused(shape, mask):
    q, k = np.ones((*shape[:3], 2)), np.ones((*shape[:2], shape[3], 2))
    for values in (np.ones(mask), np.ones(mask, bool)):
        with pytest.raises(ValueError, match="doesn't broadcast to"):
            mt.scaled_dot_product_attention(q, k, k, values)


def test_whole_numbers_are_no_mask():
    x = np.ones((1, 1, 2, 3))
    with pytest.raises(TypeError, match="attn_mask of dtype int64; it must be bool, True where a position may"):
        mt.scaled_dot_product_attention(x, x, x, np.ones((2, 2), int))


@pytest.mark.parametrize("causal, rows", [(False, 0), (False, 3), (True, 0), (True, 3)])
def test_none_of_some(causal, rows):
    """No queries, or no sources at all."""
    q, k = np.ones((2, 2, rows, 3)), np.ones((2, 2, 3 - rows, 3))
    y = mt.scaled_dot_product_attention(q, k, k, np.zeros((rows, 3 - rows)), is_causal=causal)
    assert y.shape == (2, 2, rows, 3) and not y.any()


@pytest.mark.parametrize("options", [{"attn_mask": np.zeros((3, 3))}, {"sinks": np.ones(2)}], ids=list)
def test_bare_arrays_of_bfloat16_stay_such(options):
    q, k, v = (np.random.default_rng(i).standard_normal((1, 2, 3, 4)).astype(mt.bfloat16) for i in range(3))
    bare = mt.scaled_dot_product_attention(q, k, v, **options)
    exact = mt.scaled_dot_product_attention(*(x.astype(np.float64) for x in (q, k, v)), **options)
    assert bare.dtype == mt.bfloat16
    np.testing.assert_allclose(bare.astype(np.float64), exact, atol=0.05)
