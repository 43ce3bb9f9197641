"""Floating numbers of few bits: those of ml_dtypes, to the nearest and by chance."""

import ml_dtypes
import numpy as np
import pytest

from minitorch_dist.compress.formats import E2M1, E4M3, E5M2, hadamard
from tests.device.fake_cupy import installed, transfers

THEIRS = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2, E2M1: ml_dtypes.float4_e2m1fn}


def numbers(form):
    """All finite numbers of a format, in order."""
    every = np.arange(16 if form is E2M1 else 256, dtype=np.uint8).view(THEIRS[form]).astype(np.float64)
    return np.unique(every[np.isfinite(every)])


def nearest(x, form):
    """By search, halves to the one whose last bit is 0."""
    every = numbers(form)
    codes = every.astype(THEIRS[form]).view(np.uint8)
    above = np.clip(np.searchsorted(every, x), 1, len(every) - 1)
    up, down = every[above] - x, x - every[above - 1]
    return every[np.where((up < down) | ((up == down) & (codes[above] % 2 == 0)), above, above - 1)]


@pytest.mark.parametrize("form", THEIRS, ids=lambda form: form.name)
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_rounding_is_to_the_nearest_number_halves_to_even(form, dtype):
    every = numbers(form)
    assert every[-1] == form.largest and every[every > 0][0] == 2.0 ** (form.least - form.bits)
    between, ends = ((every[1:] + every[:-1]) / 2).astype(dtype), np.array([np.inf, -np.inf], dtype)
    random = np.random.default_rng(0)
    spread = random.standard_normal(20_000) * np.exp2(random.uniform(-30, 20, 20_000))
    x = np.concatenate([every, between, *(np.nextafter(between, end) for end in ends), spread,
                        [1e30, -1e30, 3.0 * form.largest]]).astype(dtype)
    found = form.rounded(x)
    assert found.dtype == x.dtype and (found == nearest(x.astype("f8"), form)).all()
    if dtype == "f4":       # (theirs rounds float64 twice)
        theirs = np.clip(x, -form.largest, form.largest).astype(THEIRS[form]).astype(dtype)
        assert (found == theirs).all() and (np.signbit(found) == np.signbit(theirs)).all()
    assert np.isnan(form.rounded(np.array([np.nan], dtype))).all()


def test_e2m1_is_fifteen_numbers():
    every = [0.5, 1, 1.5, 2, 3, 4, 6]
    assert numbers(E2M1).tolist() == [-v for v in every[::-1]] + [0] + every
    halves = [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5, 4), (5.1, 6), (9, 6)]
    assert E2M1.rounded(np.array([x for x, _ in halves])).tolist() == [q for _, q in halves]


@pytest.mark.parametrize("form", THEIRS, ids=lambda form: form.name)
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_rounding_by_chance_has_the_numbers_mean(form, dtype):
    """Over chances that are evenly spread: x's neighbours a ≤ x ≤ b alone, mean x, variance (x - a)(b - x)."""
    every, count = numbers(form), 1 << 12
    random, chance = np.random.default_rng(1), (np.arange(count, dtype="f4") + 0.5) / count
    x = random.choice([-1, 1], 200) * np.exp2(random.uniform(form.least - form.bits - 2, np.log2(form.largest), 200))
    x = np.concatenate([x, every[::max(1, len(every) // 40)], [2 * form.largest]]).astype(dtype)
    drawn = form.rounded(np.repeat(x[:, None], count, 1), np.broadcast_to(chance, (len(x), count)))
    assert drawn.dtype == x.dtype
    wide, inside = drawn.astype("f8"), np.clip(x.astype("f8"), -form.largest, form.largest)
    above = np.clip(np.searchsorted(every, inside), 1, len(every) - 1)
    a, b = every[above - 1], every[above]
    assert ((drawn == a[:, None]) | (drawn == b[:, None])).all()
    assert (np.abs(wide.mean(1) - inside) <= (b - a) / count).all()
    assert (np.abs(wide.var(1) - (inside - a) * (b - inside)) <= 2 * (b - a) ** 2 / count).all()
    assert np.isnan(form.rounded(np.array([np.nan], dtype), chance[:1])).all()


def test_on_a_gpu_the_signs_are_sent_once():
    x = np.random.default_rng(2).standard_normal((3, 37)).astype("f4")
    with installed() as cupy:
        there = cupy.asarray(x)
        hadamard(there)
        transfers.clear()
        mixed = hadamard(there)
        assert not transfers
        assert mixed.get().tobytes() == hadamard(x).tobytes()
