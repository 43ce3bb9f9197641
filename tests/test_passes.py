"""What NumPy is spared on the host: formulas run by tiles, choices made by bits, bounds by clip. All to the bit."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import backend
from minitorch_dist.backend import passes
from minitorch_dist.backend.passes import FEW, LONG, TILE, WIDE, by_tiles, choose, running_sum

SHAPE = 97, 701         # two tiles and a part of one
assert 2 * TILE < 97 * 701 < 3 * TILE


def draws(count, dtype="f4", shape=SHAPE):
    rng = np.random.default_rng(3)
    return [rng.standard_normal(shape).astype(backend.as_dtype(dtype)) for _ in range(count)]


# ---------------------------------------------------------------- tiles

def test_a_formula_sees_no_more_than_a_tile_and_gives_the_same_bits():
    seen = []

    def formula(x, y, factor, both):
        seen.append(x.size)
        product = np.tanh(x * y) * factor
        return product, product > y if both else None
    x, y = draws(2)
    y = y[:, ::-1]
    for both in (True, False):
        made, whole = by_tiles(formula)(x, y, 3.0, both), formula(x, y, 3.0, both)
        assert made[0].tobytes() == whole[0].tobytes() and made[0].shape == SHAPE and made[0].dtype == np.float32
        assert made[1] is None and whole[1] is None or (made[1] == whole[1]).all() and made[1].dtype == bool
        assert seen == [TILE, TILE, 97 * 701 - 2 * TILE, 97 * 701]
        seen.clear()


def test_one_array_and_what_is_no_array():
    assert by_tiles(np.exp)(draws(1)[0]).tobytes() == np.exp(draws(1)[0]).tobytes()
    assert by_tiles(np.exp)(0.0) == 1 and by_tiles(np.exp)(np.zeros((0, 3))).shape == (0, 3)


@pytest.mark.parametrize("function, inputs", [
    (mt.sigmoid, 1), (mt.erf, 1), (mt.gelu, 1), (lambda x: mt.gelu(x, "tanh"), 1), (mt.swiglu, 2),
    (lambda x, y: mt.where(x > 0, x * y, y), 2)])
def test_ops_of_many_rows_are_those_of_each(function, inputs):
    """Rows of 701, each below FEW and far below a tile, one after the other."""
    *values, ct = draws(inputs + 1)
    whole = [mt.tensor(v, requires_grad=True) for v in values]
    out = function(*whole)
    out.backward(mt.tensor(ct))
    for i in range(97):
        rows = [mt.tensor(v[i], requires_grad=True) for v in values]
        row = function(*rows)
        row.backward(mt.tensor(ct[i]))
        assert row.data.tobytes() == out.data[i].tobytes()
        assert all(r.grad.data.tobytes() == w.grad.data[i].tobytes() for r, w in zip(rows, whole, strict=True))


# ---------------------------------------------------------------- running sums

@pytest.mark.parametrize("dtype", ["f4", "f8", "i4", "bool"])
@pytest.mark.parametrize("shape, axis", [((7, 1500), 0), ((1500, 7), 1), ((3, 7, 11, 50), -2), ((3, 5, 400), 1),
                                         ((1, LONG), 0), ((5, 4), 0), ((0, 2000), 0), ((2000, 0), 0)])
def test_running_sums_have_numpys_bits(dtype, shape, axis):
    """Many and few, forwards and backwards, however they lie in memory."""
    x = (draws(1, "f8", shape)[0] * 3).astype(dtype)
    for array in (x, np.asfortranarray(x), np.stack([x, x], -1)[..., 1], x[::-1]):
        whole = array.dtype.kind != "f"
        right = array.cumsum(axis, None if whole else array.dtype)
        turned = np.flip(np.flip(array, axis).cumsum(axis, None if whole else array.dtype), axis)
        for made, wanted in ((running_sum(array, axis), right), (running_sum(array, axis, True), turned)):
            assert made.dtype == wanted.dtype and made.shape == shape and made.tobytes() == wanted.tobytes()


def test_running_sums_side_by_side_are_numbers_of_places(monkeypatch):
    """One addition for each place but the first; NumPy's own where there are few, or where each is far from the next.
    """
    calls = []
    monkeypatch.setattr(passes.xp, "add", lambda *args, add=np.add, **more: calls.append(1) or add(*args, **more))
    for shape, axis, added in (((7, LONG), 0, 6), ((7, LONG - 1), 0, 0), ((LONG // WIDE, 5, WIDE), -2, 4),
                               ((LONG, 5, WIDE - 1), 1, 0), ((LONG, 5), 1, 0)):
        running_sum(np.ones(shape), axis)
        assert len(calls) == added
        calls.clear()


# ---------------------------------------------------------------- choices

@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", "bfloat16"])
def test_choose_is_where(dtype):
    x, y = draws(2, dtype)
    for array in (x, y):
        array.flat[:8] = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 6e-8, -6e-8]
    condition = draws(1, "f8")[0] > 0.3
    cases = [(condition, x, y), (condition, x, 0.0), (condition, 0.0, y), (condition, x, -0.0), (condition, 2, y),
             (condition, True, y), (condition[:, :1], x, y[0]), (condition[::-1, ::2], x[:, ::2], y[:, ::2]),
             (condition, x, y.max()), (np.asfortranarray(condition), x, y.T.copy().T)]
    for case in cases:
        # (NumPy makes float64 of bfloat16 and a number of Python's, which is weak here.)
        made, right = choose(*case), np.where(case[0], *[np.asarray(v, x.dtype) for v in case[1:]])
        assert made.dtype == right.dtype == x.dtype and made.shape == right.shape
        assert made.tobytes() == right.tobytes()


def test_choose_by_bits_only_where_it_may(monkeypatch):
    """Other dtypes, mixed ones and few elements are NumPy's own."""
    calls = []
    monkeypatch.setattr(passes.xp, "where", lambda *args, where=np.where: calls.append(1) or where(*args))
    x, y = draws(2)
    condition = x > y
    for case in [(condition, x, y.astype("f8")), (condition, x.astype("i4"), y.astype("i4")), (condition, 1.0, 2.0),
                 (condition * 1, x, y), (condition, x.astype("i8"), 0.5), (condition[0], x[0], y[0])]:
        made = choose(*case)
        assert calls.pop() and (made == np.where(*case)).all() and made.dtype == np.where(*case).dtype
        calls.clear()
    assert condition[0].size < FEW
    assert choose(condition, x, y).size and not calls


# ---------------------------------------------------------------- bounds

@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", "bfloat16", "i4"])
def test_relu_has_the_bits_of_numpys_maximum(dtype):
    """Of -0, NaN and infinity too, in arrays of any layout, long and short."""
    odd = np.array([-0.0, 0.0, np.nan, -np.nan, np.inf, -np.inf, 1e-45, -1e-45]) if dtype != "i4" else np.arange(-4, 4)
    x = np.concatenate([np.tile(odd, 800), 9 * draws(1)[0].reshape(-1)[:3600]]).astype(backend.as_dtype(dtype))
    for case in (x, x[:50], x.reshape(100, 100)[::-1, ::2], x.reshape(100, 100).T):
        y = mt.relu(mt.tensor(case)).numpy()
        assert y.dtype == case.dtype and y.tobytes() == np.maximum(case, case.dtype.type(0)).tobytes()
