"""Attention with a window: who sees whom, what is multiplied and kept, and the same numbers as of all scores."""

import functools
import itertools

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist.autodiff.ops import attention as module

BANDS = [(3, 0), (0, 0), (2, 5), (-4, 9), (6, -2), (0, 3), (None, -3), (-3, None), (-50, 80), (5, -9)]


def seen(times, sources, left, right):
    """The pairs of a band, one by one."""
    return {(t, s) for t in range(times) for s in range(sources)
            if (left is None or s >= t - left) and (right is None or s <= t + right)}


@pytest.mark.parametrize("times, sources", [(23, 23), (9, 40), (31, 12)])
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("fewest", [1, 7, 64])
def test_pieces_have_all_pairs_of_the_band_once(times, sources, band, fewest, monkeypatch):
    monkeypatch.setattr(module, "FEWEST", fewest)
    cut = module.pieces(times, sources, band)
    assert bool(cut) <= (None not in band)
    found = [(t + rows.start, s + columns.start) for rows, columns, part in cut if part is not None
             for t, s in seen(rows.stop - rows.start, columns.stop - columns.start, *part)]
    assert not cut or len(found) == len(set(found)) and set(found) == seen(times, sources, *band)


@pytest.mark.parametrize("band", [(None, None), (None, 0), *BANDS])
def test_a_part_of_a_band_is_counted_from_its_own_first_positions(band):
    whole = seen(40, 40, *band)
    for rows, columns in ((slice(0, 40), slice(0, 40)), (slice(10, 20), slice(0, 10)), (slice(0, 5), slice(7, 30)),
                          (slice(30, 40), slice(30, 33)), (slice(12, 13), slice(2, 40))):
        part = module.part_of_band(band, rows, columns)
        wanted = {(t - rows.start, s - columns.start) for t, s in whole
                  if rows.start <= t < rows.stop and columns.start <= s < columns.stop}
        times, sources = rows.stop - rows.start, columns.stop - columns.start
        assert (set() if part is None else seen(times, sources, *part)) == wanted
        assert part is None or part != (None, None) or len(wanted) == times * sources
        assert len(wanted) < times * sources or part == (None, None)


def by_hand(q, k, v, ct, window, causal, documents=None):
    """(y, dq, dk, dv), position by position."""
    y, dq, dk, dv = np.zeros_like(ct), np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    group, scale = q.shape[1] // k.shape[1], q.shape[3] ** -0.5
    for b, h, t in np.ndindex(q.shape[:3]):
        s = [s for s in range(k.shape[2]) if abs(t - s) < window and not (causal and s > t)
             and (documents is None or documents[b, t] == documents[b, s])]
        if not s:
            continue
        g = h // group
        e = np.exp(k[b, g, s] @ q[b, h, t] * scale)
        p = e / e.sum()
        y[b, h, t] = p @ v[b, g, s]
        score = p * (v[b, g, s] @ ct[b, h, t] - ct[b, h, t] @ y[b, h, t]) * scale
        dq[b, h, t] = score @ k[b, g, s]
        dk[b, g, s] += score[:, None] * q[b, h, t]
        dv[b, g, s] += p[:, None] * ct[b, h, t]
    return y, dq, dk, dv


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("times, sources, window, fewest", [
    (23, 23, 4, 1), (23, 23, 4, 64), (50, 50, 7, 10), (40, 17, 3, 2), (12, 40, 5, 1), (9, 9, 1, 2), (9, 9, 30, 1)])
def test_values_and_gradients(times, sources, window, fewest, causal, monkeypatch):
    """Values and gradients, some of which nobody asks for; a query beyond all sources gives 0."""
    monkeypatch.setattr(module, "FEWEST", fewest)
    draw = np.random.default_rng(times).standard_normal
    q, k, v, ct = draw((2, 4, times, 3)), draw((2, 2, sources, 3)), draw((2, 2, sources, 5)), draw((2, 4, times, 5))
    documents = np.arange(times) // 6 + np.array([[0], [2]]) if times == sources else None
    for numbers in (None, documents):
        wanted = by_hand(q, k, v, ct, window, causal, numbers)
        options = {"is_causal": causal, "window": window, "documents": numbers}
        y, pull = mt.vjp(functools.partial(mt.scaled_dot_product_attention, **options), q, k, v)
        for got, true in zip((y, *pull(ct)), wanted, strict=True):
            np.testing.assert_allclose(got, true, rtol=0, atol=1e-12)
    for i in range(3):
        leaves = [mt.tensor(x, requires_grad=i == j) for j, x in enumerate((q, k, v))]
        mt.scaled_dot_product_attention(*leaves, is_causal=causal, window=window).backward(mt.tensor(ct))
        wanted = by_hand(q, k, v, ct, window, causal)
        np.testing.assert_allclose(leaves[i].grad.numpy(), wanted[1 + i], rtol=0, atol=1e-12)


@pytest.mark.parametrize("fewest", [1, 64])
def test_derivatives_of_any_order_and_mode(fewest, monkeypatch):
    monkeypatch.setattr(module, "FEWEST", fewest)
    draw = np.random.default_rng(3).standard_normal
    mt.check_grads(lambda *x: mt.scaled_dot_product_attention(*x, is_causal=True, window=2),
                   [draw((1, 2, 7, 2)), draw((1, 1, 7, 2)), draw((1, 1, 7, 3))])


def test_with_a_mask_both_must_allow_it():
    draw = np.random.default_rng(5).standard_normal
    q, k, v, mask = draw((1, 2, 200, 4)), draw((1, 2, 200, 4)), draw((1, 2, 200, 4)), draw((200, 200)) > 0
    near = np.tri(200, dtype=bool) & ~np.tri(200, k=-9, dtype=bool)
    one = mt.scaled_dot_product_attention(q, k, v, mask, is_causal=True, window=9)
    np.testing.assert_allclose(one, mt.scaled_dot_product_attention(q, k, v, mask & near), atol=1e-12)


@pytest.mark.parametrize("window, kept", [(100, 2 * 100 - 1), (10, 64 + 9), (1, 64), (300, 512)])
def test_what_is_kept_for_backward_grows_with_the_window_not_with_the_sequence(window, kept):
    q = mt.tensor(np.zeros((1, 2, 512, 4)), requires_grad=True)
    with mt.ledger.record(memory=True) as book:
        y = mt.scaled_dot_product_attention(q, q, q, is_causal=True, window=window)
        assert book.live["activation"] == 8 * 2 * 512 * kept
    del y


def test_a_window_as_long_as_the_sequence_is_none():
    """No number is too large."""
    draw = np.random.default_rng(6).standard_normal
    for times, sources in ((9, 9), (4, 7), (9, 0), (0, 5)):
        q, k = draw((1, 2, times, 3)), draw((1, 2, sources, 3))
        for causal, window in itertools.product((True, False), (9, 2 ** 63 - 1, 10 ** 30)):
            found = mt.scaled_dot_product_attention(q, k, k, is_causal=causal, window=window)
            np.testing.assert_array_equal(found, mt.scaled_dot_product_attention(q, k, k, is_causal=causal))


@pytest.mark.parametrize("wide", range(3))
def test_of_several_dtypes_the_widest(wide):
    parts = [np.ones((1, 1, 200, 2), np.float64 if i == wide else np.float32) for i in range(3)]
    assert mt.scaled_dot_product_attention(*parts, window=3).dtype == np.float64


def test_no_such_window():
    x = np.zeros((1, 1, 3, 2))
    for window, error in ((0, ValueError), (-2, ValueError), (1.5, TypeError)):
        with pytest.raises(error, match=r"window=0 must be|window=-2 must be|window=1.5: must be"):
            mt.scaled_dot_product_attention(x, x, x, window=window)
